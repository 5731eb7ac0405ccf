from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.data.refs import Bucket
from gracetune.data.sampler import Cursor, GlobalBatch, Order, OrderSource, SampleGroup
from gracetune.seeded_random import random_bits

A, B, C = Bucket(64, 64), Bucket(96, 64), Bucket(64, 96)


def group(source: int, shape: Bucket, visits: list[int], first: int = 0) -> SampleGroup:
    samples = tuple(range(first, first + len(visits)))
    return SampleGroup(
        source, (shape,), samples, tuple(visits), tuple(random_bits(0, f"{sample}.png") for sample in samples)
    )


@st.composite
def orders(random_bits: st.DrawFn) -> Order:
    """One to three datasets, each with one to three groups whose samples are visited 1 to 4 times."""
    sources, groups = [], []
    for position in range(random_bits(st.integers(1, 3))):
        own = random_bits(st.one_of(st.none(), st.integers(1, 5)))
        sources.append(OrderSource(f"d{position}", random_bits(st.floats(0.1, 3.0)), own))
        first = 0
        for shape in (A, B, C)[: random_bits(st.integers(1, 3))]:
            visits = random_bits(st.lists(st.integers(1, 4), min_size=1, max_size=9))
            groups.append(group(position, shape, visits, first))
            first += len(visits)
    return Order(sources, groups, seed=random_bits(st.integers(0, 1000)), batch_size=2)


def epoch(order: Order, cursor: Cursor, sizes: list[int], world_size: int = 1) -> tuple[list[GlobalBatch], Cursor]:
    batches = []
    while (chosen := order.next_batch(cursor, sizes[len(batches) % len(sizes)], 0, world_size)) is not None:
        batches.append(chosen[0])
        cursor = chosen[1]
    return batches, cursor


def visited(batches: list[GlobalBatch]) -> Counter[tuple[int, int, int]]:
    return Counter((batch.source, visit.sample, visit.round) for batch in batches for visit in batch.visits)


def expected(order: Order) -> Counter[tuple[int, int, int]]:
    return Counter(
        (of.source, sample, turn)
        for of in order.groups
        for sample, visits in zip(of.samples, of.visits, strict=True)
        for turn in range(visits)
    )


class TestAnEpoch:
    @settings(deadline=None)
    @given(orders(), st.integers(1, 7), st.integers(1, 3))
    def test_whole_epoch_equals_a_simulated_epoch(self, order: Order, size: int, world_size: int) -> None:
        _, behind = epoch(order, order.start(), [size], world_size)
        assert order.whole_epoch(0, size, 0, world_size) == behind

    def test_a_million_repeats_are_handled_one_round_at_a_time(self) -> None:
        order = Order([OrderSource("d")], [group(0, A, [1_000_001] * 2_000)], seed=1, batch_size=4)
        assert order.whole_epoch(0, 4, 0, 1).batches == 500_000_500
        late = replace(order.start(), taken=(2_000_001_998,))
        chosen, behind = order.next_batch(late, 4, 0, 1) or pytest.fail("there are two left")
        assert [visit.round for visit in chosen.visits] == [1_000_000] * 2
        assert order.next_batch(behind, 4, 0, 1) is None

    @settings(deadline=None)
    @given(orders(), st.integers(1, 7))
    def test_handed_out_returns_the_visited_samples(self, order: Order, size: int) -> None:
        batches, cursor = epoch(order, order.start(), [size])
        for number, of in enumerate(order.groups):
            chosen = [visit.sample for batch in batches for visit in batch.visits
                     if (batch.source, batch.shape) == (of.source, of.shape)]  # fmt: skip
            assert order.visited_samples(cursor, number).tolist() == chosen

    @settings(deadline=None)
    @given(orders(), st.lists(st.integers(1, 7), min_size=1, max_size=5), st.integers(1, 5))
    def test_every_sample_has_its_visits_for_any_batch_sizes(
        self, order: Order, sizes: list[int], world_size: int
    ) -> None:
        batches, cursor = epoch(order, order.start(), sizes, world_size)
        assert visited(batches) == expected(order)
        assert cursor.consumed == sum(of.total for of in order.groups)
        assert cursor.batches == len(batches)

    @settings(deadline=None)
    @given(orders(), st.integers(1, 7), st.integers(1, 4))
    def test_a_batch_has_one_dataset_one_shape_and_consecutive_indexes(
        self, order: Order, size: int, world_size: int
    ) -> None:
        batches, _ = epoch(order, order.start(), [size], world_size)
        index = 0
        for batch in batches:
            members = [of for of in order.groups if of.source == batch.source and of.shape == batch.shape]
            assert {visit.sample for visit in batch.visits} <= set(members[0].samples)
            assert 1 <= len(batch.visits) <= order.size(batch.source, size) * world_size
            assert batch.first_index == index
            index += len(batch.visits)

    @settings(deadline=None)
    @given(orders(), st.integers(1, 7))
    def test_only_the_last_batch_of_a_group_is_short(self, order: Order, size: int) -> None:
        batches, cursor = epoch(order, order.start(), [size])
        short = [batch for batch in batches if len(batch.visits) < order.size(batch.source, size)]
        assert cursor.short == len(short) <= len(order.groups)
        assert len({(batch.source, batch.shape) for batch in short}) == len(short)

    @settings(deadline=None)
    @given(orders(), st.integers(1, 7))
    def test_no_sample_of_a_group_is_visited_twice_before_all_once(self, order: Order, size: int) -> None:
        batches, _ = epoch(order, order.start(), [size])
        for of in order.groups:
            rounds = [
                visit.round
                for batch in batches
                if batch.source == of.source and batch.shape == of.shape
                for visit in batch.visits
            ]
            assert rounds == sorted(rounds)

    @settings(deadline=None)
    @given(orders(), st.integers(1, 4), st.lists(st.integers(1, 5), min_size=1, max_size=4))
    def test_the_order_does_not_depend_on_the_number_of_ranks(
        self, order: Order, world_size: int, sizes: list[int]
    ) -> None:
        """A dataset's own batch size is tested only with the run's size, because it scales by rounding."""
        plain = Order([replace(source, batch_size=None) for source in order.sources], order.groups, seed=order.seed,
                      batch_size=2)  # fmt: skip
        together, _ = epoch(plain, plain.start(), sizes, world_size)
        alone, _ = epoch(plain, plain.start(), [size * world_size for size in sizes], 1)
        assert together == alone

    @settings(deadline=None)
    @given(orders(), st.integers(1, 5))
    def test_it_is_a_function_of_the_cursor(self, order: Order, size: int) -> None:
        again = Order(order.sources, order.groups, seed=order.seed, batch_size=order.batch_size)
        cursor = order.start()
        while (chosen := order.next_batch(cursor, size, 0, 1)) is not None:
            assert again.next_batch(cursor, size, 0, 1) == chosen
            cursor = chosen[1]

    @settings(deadline=None)
    @given(orders())
    def test_changing_batch_or_world_size_in_an_epoch_loses_nothing(self, order: Order) -> None:
        cursor, batches = order.start(), []
        for size, world_size in ((1, 3), (4, 1), (2, 2)):
            chosen = order.next_batch(cursor, size, 0, world_size)
            if chosen is not None:
                batches.append(chosen[0])
                cursor = chosen[1]
        rest, _ = epoch(order, cursor, [3], 2)
        assert visited(batches + rest) == expected(order)


class TestShuffling:
    ORDER = Order([OrderSource("d")], [group(0, A, [1] * 40)], seed=3, batch_size=1)

    def samples(self, order: Order, number: int = 0) -> list[int]:
        batches, _ = epoch(order, replace(order.start(), epoch=number), [1])
        return [visit.sample for batch in batches for visit in batch.visits]

    def test_epochs_differ(self) -> None:
        assert self.samples(self.ORDER, 0) != self.samples(self.ORDER, 1)

    def test_seeds_differ(self) -> None:
        other = Order(self.ORDER.sources, self.ORDER.groups, seed=4, batch_size=1)
        assert self.samples(self.ORDER) != self.samples(other)

    def test_other_groups_do_not_change_a_group_s_order(self) -> None:
        more = Order([OrderSource("d")], [*self.ORDER.groups, group(0, B, [1] * 7, 40)], seed=3, batch_size=1)
        assert [sample for sample in self.samples(more) if sample < 40] == self.samples(self.ORDER)

    def test_datasets_differ(self) -> None:
        other = Order([OrderSource("other")], self.ORDER.groups, seed=3, batch_size=1)
        assert self.samples(self.ORDER) != self.samples(other)

    def test_rounds_differ(self) -> None:
        order = Order([OrderSource("d")], [group(0, A, [2] * 40)], seed=3, batch_size=1)
        samples = self.samples(order)
        assert sorted(samples[:40]) == sorted(samples[40:]) == list(range(40))
        assert samples[:40] != samples[40:]

    def test_groups_alternate(self) -> None:
        order = Order([OrderSource("d")], [group(0, A, [1] * 50), group(0, B, [1] * 50, 50)], seed=1, batch_size=1)
        first = [sample < 50 for sample in self.samples(order)[:40]]
        assert 8 < sum(first) < 32


class TestMixing:
    def test_probability_decides_how_early_a_dataset_is_visited(self) -> None:
        """Both have 100 samples; one is chosen four times as often until it is used up."""
        order = Order(
            [OrderSource("a", 4.0), OrderSource("b", 1.0)],
            [group(0, A, [1] * 100), group(1, A, [1] * 100)],
            seed=5,
            batch_size=1,
        )
        batches, _ = epoch(order, order.start(), [1])
        early = Counter(batch.source for batch in batches[:100])
        assert 70 <= early[0] <= 90
        assert Counter(batch.source for batch in batches) == {0: 100, 1: 100}

    def test_equal_probabilities_mix_by_size(self) -> None:
        order = Order(
            [OrderSource("a"), OrderSource("b")], [group(0, A, [1] * 300), group(1, A, [1] * 100)], seed=5, batch_size=1
        )
        batches, _ = epoch(order, order.start(), [1])
        assert 140 <= Counter(batch.source for batch in batches[:200])[0] <= 160

    def test_repeats_are_further_visits(self) -> None:
        order = Order([OrderSource("a")], [group(0, A, [3] * 5)], seed=5, batch_size=1)
        batches, _ = epoch(order, order.start(), [1])
        assert Counter(visit.sample for batch in batches for visit in batch.visits) == dict.fromkeys(range(5), 3)

    @pytest.mark.parametrize(
        ("own", "requested", "size"), [(None, 3, 3), (8, 4, 8), (8, 2, 4), (8, 1, 2), (1, 4, 1), (1, 1, 1), (3, 2, 2)]
    )
    def test_a_dataset_s_own_batch_grows_with_the_ramp(self, own: int | None, requested: int, size: int) -> None:
        order = Order([OrderSource("a", batch_size=own)], [group(0, A, [1])], seed=1, batch_size=4)
        assert order.size(0, requested) == size


class TestPeriods:
    @pytest.mark.parametrize(
        ("source", "epoch", "step", "active"),
        [
            (OrderSource("a"), 0, 0, True),
            (OrderSource("a", start_epoch=2), 0, 0, False),
            (OrderSource("a", start_epoch=2), 1, 0, True),
            (OrderSource("a", end_epoch=2), 1, 0, True),
            (OrderSource("a", end_epoch=2), 2, 0, False),
            (OrderSource("a", start_step=300), 0, 299, False),
            (OrderSource("a", start_step=300), 0, 300, True),
            (OrderSource("a", end_step=300), 0, 299, True),
            (OrderSource("a", end_step=300), 0, 300, False),
            (OrderSource("a", start_epoch=2, start_step=300), 1, 299, False),
            (OrderSource("a", start_epoch=2, start_step=300), 0, 300, False),
        ],
    )
    def test_active(self, source: OrderSource, epoch: int, step: int, active: bool) -> None:
        assert source.active(epoch, step) == active

    def test_a_dataset_joins_and_leaves_in_mid_epoch(self) -> None:
        order = Order(
            [OrderSource("low", end_step=3), OrderSource("high", start_step=3)],
            [group(0, A, [1] * 10), group(1, B, [1] * 10)],
            seed=1,
            batch_size=1,
        )
        cursor, seen = order.start(), []
        for step in range(20):
            chosen = order.next_batch(cursor, 1, step, 1)
            if chosen is None:
                break
            seen.append(chosen[0].source)
            cursor = chosen[1]
        assert seen == [0] * 3 + [1] * 10
