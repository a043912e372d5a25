from itertools import combinations

import numpy
import pytest

from scheduler import Kind
from scheduler.palette import IDLE_COLOUR, colour, ink

COMPUTE = "FBIW"
# What a screen's red, green and blue become for someone who lacks one kind of cone (Machado et al. 2009, severity 1).
EYES = {
    "normal": numpy.eye(3),
    "protanope": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranope": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanope": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def lab(text, eyes="normal"):
    """CIE L*a*b* (D65) of an sRGB colour as these eyes see it."""
    parts = numpy.array([int(text[at:at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = numpy.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    linear = numpy.clip(numpy.array(EYES[eyes]) @ linear, 0, 1)
    matrix = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    xyz = matrix @ linear / numpy.array([0.95047, 1, 1.08883])
    root = numpy.where(xyz > 0.008856, numpy.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return numpy.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


def shades(kind, of=4):
    return [colour(Kind(kind), index, of) for index in range(of)]


def test_kinds_and_idle_have_bands_of_lightness_of_their_own():
    bands = [sorted(lab(shade)[0] for shade in shades(kind)) for kind in "BFIW"] + [[lab(IDLE_COLOUR)[0]]]
    for darker, lighter in zip(bands, bands[1:]):
        assert lighter[0] - darker[-1] > 5
    assert lab("#ffffff")[0] - bands[-1][0] > 5


@pytest.mark.parametrize("eyes", EYES)
def test_kinds_are_told_apart_by_all_eyes(eyes):
    for one, other in combinations([*map(shades, COMPUTE), [IDLE_COLOUR]], 2):
        for first in one:
            for second in other:
                assert numpy.linalg.norm(lab(first, eyes) - lab(second, eyes)) > 15


@pytest.mark.parametrize("of", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", COMPUTE)
def test_shades_of_a_kind_grow_paler(kind, of):
    lightness = [lab(shade)[0] for shade in shades(kind, of)]
    assert lightness == sorted(set(lightness))


@pytest.mark.parametrize("background", [shade for kind in COMPUTE for shade in shades(kind)] + ["#9aa0a6"])
def test_ink_contrasts_with_every_colour(background):
    luminances = sorted(((lab(text)[0] + 16) / 116) ** 3 for text in (background, ink(background)))
    assert (luminances[1] + 0.05) / (luminances[0] + 0.05) > 4


def test_messages_are_grey():
    assert colour(Kind.SEND_F) == colour(Kind.RECV_B, 1, 2) == "#9aa0a6"
