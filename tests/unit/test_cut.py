"""How parameters of several formats are cut into subgroups."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infinity_engine.optim import NORM_BLOCK, FloatFormat, Formats, Subgroup, cut_into_subgroups
from infinity_engine.placement.sizing import cut

FORMATS = (Formats(), Formats(parameter=FloatFormat.BF16), Formats(parameter=FloatFormat.FP16))
PARAMETERS = st.lists(
    st.tuples(st.integers(0, 5 * NORM_BLOCK), st.sampled_from(FORMATS)), min_size=1, max_size=12
)
LIMITS = st.integers(NORM_BLOCK, 3 * NORM_BLOCK)
SMALL = st.none() | st.integers(0, 8 * NORM_BLOCK)


def pieces_of(subgroups: tuple[Subgroup, ...], parameter: int) -> list[tuple[int, int]]:
    segments = [segment for subgroup in subgroups for segment in subgroup.segments]
    return [(each.first_element, each.numel) for each in segments if each.parameter == parameter]


@given(PARAMETERS, LIMITS, SMALL)
def test_every_element_is_in_one_subgroup_of_its_format(
    parameters: list[tuple[int, Formats]], limit: int, small: int | None
) -> None:
    subgroups = cut(parameters, limit, small_bytes=small)

    assert [each.index for each in subgroups] == list(range(len(subgroups)))
    assert all(0 < each.numel <= limit for each in subgroups)
    for subgroup in subgroups:
        assert {parameters[segment.parameter][1] for segment in subgroup.segments} == {
            subgroup.formats
        }
    for number, (numel, _) in enumerate(parameters):
        at = 0
        for first, piece in pieces_of(subgroups, number):
            assert first == at
            at += piece
        assert at == numel


@given(PARAMETERS, LIMITS, SMALL)
def test_small_parameters_come_first_and_others_in_their_order(
    parameters: list[tuple[int, Formats]], limit: int, small: int | None
) -> None:
    keys = []
    for subgroup in cut(parameters, limit, small_bytes=small):
        sizes = [
            parameters[each.parameter][0] * subgroup.formats.width for each in subgroup.segments
        ]
        are_small = {small is not None and nbytes < small for nbytes in sizes}
        assert len(are_small) == 1
        keys.append(
            (
                not are_small.pop(),
                subgroup.segments[0].parameter,
                subgroup.segments[0].first_element,
            )
        )
    assert keys == sorted(keys)


@given(
    st.lists(st.integers(0, 5 * NORM_BLOCK), min_size=1, max_size=12),
    LIMITS,
    st.sampled_from(FORMATS),
)
def test_parameters_of_one_format_are_cut_as_they_come(
    numels: list[int], limit: int, formats: Formats
) -> None:
    assert cut([(numel, formats) for numel in numels], limit) == cut_into_subgroups(
        numels, limit, formats
    )
