"""Balanced partitions of nn.Sequential: the layers that each stage gets; models as nn.Sequential; devices.

    model ─► to_sequential ─► nn.Sequential of its beginning, its blocks and its end

    profile ─► Profile: seconds or FLOPs, and bytes, of each layer
    balance_by_time ─► profiles ─► seconds per layer ─┐
    balance_by_size ─► profiles ─► bytes per layer ───┴─► balance_costs ─► balance ─► split ─► stages

    devices ─► hardware ─► the GPUs of this host, how they are joined, which to take in which order
"""

from partition.balancing import balance_by_size, balance_by_time
from partition.contiguous import balance_costs
from partition.cuts.cutting import cut
from partition.cuts.windows import StageSpec
from partition.errors import PartitionError
from partition.hardware.inventory import devices
from partition.models.sequential import to_sequential
from partition.plans.plan import Plan
from partition.plans.planning import plan
from partition.profiles.profile import LayerProfile, Profile
from partition.profiles.profiling import profile
from partition.splitting import split

__all__ = [
    # what goes wrong
    "PartitionError",
    # cut
    "split",
    "to_sequential",
    # measure
    "LayerProfile",
    "Profile",
    "profile",
    # choose all
    "Plan",
    "plan",
    # choose where
    "StageSpec",
    "cut",
    "balance_costs",
    "balance_by_time",
    "balance_by_size",
    # on what
    "devices",
]
