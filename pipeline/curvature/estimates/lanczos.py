"""Block Lanczos for the wanted eigenpairs, in rounds, until a random start finds no other.

    round 1:  random block --> Krylov space --> k Ritz pairs have converged --> lock them
    round 2:  another random block, at right angles to the locked --> Krylov space
                 --> a wanted pair more (a second copy of an eigenvalue, say) --> lock it, round 3
                 --> surely none: `EigenvectorMap.longest` falls under `shortest` --> done

    rows of the basis:   locked | with known products ... | without: the next to multiply
                                  <------- the projection's columns ------>
                                  <------- its rows, and here too ------------------->

A Krylov space of b starts shows b copies of an eigenvalue at most; the rounds show the others, b copies each.
The last round is the price of being sure: about as many products as the first one, since both must tell the k-th value
from the next (Parlett 1980, ch. 13; deflation by locking: Grimes, Lewis and Simon 1994). With `most` rows at most,
the space is cut down to its best Ritz vectors whenever it is full: thick restart (Wu and Simon 2000). Then the last
round may also end when the outermost Ritz pair of its own has converged, with no number for the probability.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pipeline.curvature.estimates.krylov import Basis, is_noise, orthogonalise_
from pipeline.curvature.estimates.ritz import EigenvectorMap, RitzPairs, ritz, shortest, thresholds, wanted
from pipeline.curvature.linear import LinearMap, products_of
from pipeline.curvature.space import HOST, Vec, scale_


@dataclass(frozen=True)
class EigenpairGoal:
    """The eigenpairs that are wanted, and with what certainty."""

    k: int
    which: str
    tol: float  # residuals, relative to the largest magnitude of an eigenvalue
    seed: int
    block: int  # starts of a round
    most: int | None  # rows of the basis
    miss: float  # probability that a round may fail to see another wanted eigenpair


@dataclass(frozen=True)
class LanczosState:
    """The state of a run, but for the rows: replaced as one at the end of each step, so that it is never torn."""

    locked: Tensor  # their values
    projection: Tensor  # [p + f, p]
    chain: EigenvectorMap | None  # none while fewer than k are locked: nothing is to be proved yet
    starts: int = 0  # of this round
    products: int = 0
    drawn: int = 0  # random vectors
    image: float = 0.0  # the largest norm of a product with a unit vector
    largest: float = 0.0  # magnitude of a Ritz value
    done: bool = False

    @property
    def waiting(self) -> int:
        """Rows without products."""
        return self.projection.shape[0] - self.projection.shape[1]


class LanczosRun:
    """Lanczos for one goal. Over ranks all processes take the same steps: what decides are sums over them.

    The caller asks `current.done` and calls `step`; between two steps the run can be saved.

    Args:
        A: the matrix.
        goal: what is wanted.
        saved: the state of a run, to go on with. None: it begins.
    """

    def __init__(self, A: LinearMap, goal: EigenpairGoal, saved: dict[str, Any] | None) -> None:
        self.map, self.goal = A, goal
        if saved is None:
            self.basis = Basis(A.space)
            self.current = LanczosState(torch.zeros(0, **HOST), torch.zeros(0, 0, **HOST), None)
        else:
            chain = saved["chain"] and EigenvectorMap(**saved["chain"])
            self.basis = Basis(A.space, saved["basis"])
            self.current = LanczosState(**{**saved["place"], "chain": chain})
        self._ritz = ritz(self.current.projection)

    def step(self) -> None:
        """Multiply the rows that wait, and then lock what has converged, or cut down a full space; or begin a round."""
        if self.current.waiting:
            self._multiply()
            self._judge()
        else:
            self._begin_round()

    def best(self) -> list[Vec]:
        """New vectors: the k best approximations now, the most wanted first."""
        pairs, picks = self._best()
        return self.basis.combined(self._factors(pairs, picks))

    def converged(self) -> int:
        """The number of the k best that have converged, for the progress bar."""
        pairs, picks = self._best()
        locked_count = len(self.current.locked)
        return sum(
            pick < locked_count or float(pairs.residuals[pick - locked_count]) <= self._tolerance() for pick in picks
        )

    def state(self) -> dict[str, Any]:
        """All that a run needs to go on."""
        chain = self.current.chain
        place = {**vars(self.current), "chain": None}
        return {"place": place, "chain": None if chain is None else vars(chain), "basis": self.basis.state()}

    # ------------------------------------------------------------------------------------------------- a round

    def _begin_round(self) -> None:
        """Draw a block at right angles to the locked; or be done, if nothing is left or is to be proved."""
        locked, goal = self.current.locked, self.goal
        remaining = self.map.space.size - len(locked)
        if not remaining or (len(locked) == goal.k and goal.miss >= 1):
            self.current = replace(self.current, done=True)
            return
        starts, drawn = min(goal.block, remaining), self.current.drawn
        while len(self.basis) < len(locked) + starts:
            vec = self.map.space.random("normal", goal.seed, drawn)
            [split] = orthogonalise_([self.basis], [vec], "random start")
            drawn += 1
            if not is_noise(split.norm, split.whole, self.map.space):
                self.basis.append(scale_(vec, 1 / split.norm))
        is_full = len(locked) == goal.k
        chain = EigenvectorMap.begin(thresholds(locked, goal.which, self._margin()), starts) if is_full else None
        empty = torch.zeros(starts, 0, **HOST)
        self._ritz = ritz(empty)
        self.current = replace(self.current, projection=empty, chain=chain, starts=starts, drawn=drawn)

    def _multiply(self) -> None:
        """Multiply the rows that wait; what leads out of the span become rows that wait."""
        current, space = self.current, self.map.space
        locked_count = len(current.locked)
        columns, image = list(current.projection.T), current.image
        waiting = [self.basis.row(row) for row in range(-current.waiting, 0)]
        for _, images in products_of(self.map, waiting):
            for vec in images:
                [split] = orthogonalise_([self.basis], [vec], self.map.name)
                image = max(image, split.whole)
                column = split.inside[locked_count:]
                if len(self.basis) < space.size and not is_noise(split.norm, image, space):
                    column = torch.cat([column, torch.tensor([split.norm], **HOST)])
                    self.basis.append(scale_(vec, 1 / split.norm))
                columns.append(column)
        products = current.products + len(waiting)
        self.current = replace(current, projection=pad_sequence(columns), products=products, image=image)

    def _judge(self) -> None:
        """Decide what comes after products."""
        self._ritz = pairs = ritz(self.current.projection)
        largest = max(self.current.largest, float(pairs.values.abs().max()))
        self.current = replace(self.current, largest=largest)
        _, picks = self._best()
        fresh = [pick - len(self.current.locked) for pick in picks if pick >= len(self.current.locked)]
        enough = len(picks) == self.goal.k and bool((pairs.residuals[fresh] <= self._tolerance()).all())
        if fresh and (enough or not self.current.waiting):
            self._lock(pairs, picks)
        elif not fresh and self._is_complete(pairs):
            self.current = replace(self.current, done=True)
        elif self.goal.most is not None and len(self.basis) + self.current.waiting > self.goal.most:
            self._restart(pairs, len(fresh))

    def _best(self) -> tuple[RitzPairs, list[int]]:
        """The k best of the locked, which come first, and the Ritz values, which must be better by more than noise."""
        pairs, locked_count = self._ritz, len(self.current.locked)
        values = torch.cat([self.current.locked, pairs.values])
        setbacks = torch.full((len(values),), self._margin() * (locked_count == self.goal.k), **HOST)
        setbacks[:locked_count] = 0.0
        return pairs, wanted(values, self.goal.k, self.goal.which, setbacks)

    def _is_complete(self, pairs: RitzPairs) -> bool:
        """Whether this round's start would have shown an eigenpair that is wanted more than the last of the locked."""
        current = self.current
        if not current.waiting:
            return True
        assert current.chain is not None  # k are locked when no Ritz pair is among the k best
        dimensions = self.map.space.size - len(current.locked)
        if current.chain.longest(pairs) <= shortest(dimensions, current.starts, self.goal.miss):
            return True
        # A space that is cut down after every few steps may never prove it: what each cycle tells is lost but for the
        # chain. Then the round ends as other restarted methods do, when its own outermost pairs have converged.
        ends = wanted(pairs.values, min(2, self.goal.k) if self.goal.which == "BE" else 1, self.goal.which)
        return current.chain.first > 0 and bool((pairs.residuals[ends] <= self._tolerance()).all())

    def _lock(self, pairs: RitzPairs, picks: list[int]) -> None:
        """Keep the k best, and forget the rest of the space."""
        values = torch.cat([self.current.locked, pairs.values])[picks]
        empty = torch.zeros(0, 0, **HOST)
        new_state = replace(self.current, locked=values, projection=empty, chain=None, starts=0)
        self._rotate(self._factors(pairs, picks), new_state)

    def _factors(self, pairs: RitzPairs, picks: list[int]) -> Tensor:
        """The picks in terms of the rows: [rows, picks]."""
        whole = torch.block_diag(torch.eye(len(self.current.locked), **HOST), pairs.vectors)
        factors = torch.zeros(len(self.basis), len(picks), **HOST)
        factors[: len(whole)] = whole[:, picks]
        return factors

    def _restart(self, pairs: RitzPairs, fresh: int) -> None:
        """Cut the space down to its best Ritz vectors and the rows that wait, which still lead out of it alike."""
        assert self.goal.most is not None
        locked_count, waiting = len(self.current.locked), self.current.waiting
        room = self.goal.most - locked_count - 2 * waiting
        keep = wanted(pairs.values, min(room, max(fresh, room // 2)), self.goal.which)
        factors = torch.block_diag(
            torch.eye(locked_count, **HOST), pairs.vectors[:, keep], torch.eye(waiting, **HOST)
        )
        chain = None if self.current.chain is None else self.current.chain.followed(pairs, len(keep))
        projection = torch.cat([torch.diag(pairs.values[keep]), pairs.rest[:, keep]])
        self._rotate(factors, replace(self.current, projection=projection, chain=chain))

    def _rotate(self, factors: Tensor, new_state: LanczosState) -> None:
        self.basis.rotate_(factors)
        self.current, self._ritz = new_state, ritz(new_state.projection)

    # ------------------------------------------------------------------------------------------------- tolerances

    def _tolerance(self) -> float:
        """For a residual: so small that rows mixed of k such ones are good enough still; never under the rounding."""
        eps = torch.finfo(self.map.space.dtype).eps
        return max(self.goal.tol / (2 * math.sqrt(self.goal.k)), 4 * eps) * self.current.largest

    def _margin(self) -> float:
        """The margin by which another eigenvalue must be more wanted to count: tolerance and rounding hide less."""
        return max(self.goal.tol, math.sqrt(torch.finfo(self.map.space.dtype).eps), 1e-6) * self.current.largest
