from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.data.backends.errors import UnreadableFilesError
from gracetune.data.errors import DataError
from gracetune.data.index import DataIndex
from gracetune.data.loader import EpochEnd, Exhausted, Loader, OtherDataError, Outcome
from gracetune.data.refs import BatchRef, SampleRef
from gracetune.data.sampler import BatchMixing
from unit.data.folders import made_up

Schedule = list[int]
"""Micro-batch sizes, used cyclically."""

schedules = st.lists(st.integers(1, 5), min_size=1, max_size=4)
worlds = st.integers(1, 6)


@st.composite
def indexes(draw: st.DrawFn) -> DataIndex:
    datasets = [
        {
            "counts": draw(st.lists(st.integers(1, 8), min_size=1, max_size=3)),
            "repeats": draw(st.integers(0, 2)),
            "probability": draw(st.sampled_from([0.3, 1.0, 4.0])),
            "captions": {"dropout": 0.3},
            "cache_latents": draw(st.sampled_from(["none", "disk"])),
            "crop": {"enabled": True, "style": "random"},
            "corrupt_threshold": 1.0,
        }
        for _ in range(draw(st.integers(1, 3)))
    ]
    return made_up(*datasets, seed=draw(st.integers(0, 50)))


def run(loaders: list[Loader], schedule: Schedule, batches: int, start: int = 0) -> list[list[Outcome]]:
    """The results of all ranks, call by call."""
    return [
        [loader.next_batch(schedule[(start + call) % len(schedule)]) for loader in loaders] for call in range(batches)
    ]


def ranks(index: DataIndex, world_size: int, **options: Any) -> list[Loader]:
    return [Loader(index, batch_size=2, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def together(outcomes: list[Outcome]) -> tuple[tuple[SampleRef, ...], tuple[int, ...]] | Outcome:
    """The samples of all ranks for one call without padding, in order, or the result that is not a batch."""
    first = outcomes[0]
    if not isinstance(first, BatchRef):
        assert all(outcome == first for outcome in outcomes)
        return first
    batches = [outcome for outcome in outcomes if isinstance(outcome, BatchRef)]
    assert len(batches) == len(outcomes)
    real = [batch for batch in batches if not batch.padding]
    assert {batch.bucket for batch in batches} == {first.bucket}
    assert {batch.global_samples for batch in batches} == {sum(len(batch.samples) for batch in real)}
    samples = tuple(sample for batch in real for sample in batch.samples)
    return samples, tuple(number for batch in real for number in batch.indexes)


class TestRanks:
    @given(indexes(), worlds, schedules)
    @settings(deadline=None)
    def test_ranks_together_equal_one_rank(self, index: DataIndex, world_size: int, schedule: Schedule) -> None:
        alone = run(ranks(index, 1), [size * world_size for size in schedule], 30)
        many = run(ranks(index, world_size), schedule, 30)
        assert [together(outcomes) for outcomes in many] == [together(outcomes) for outcomes in alone]

    @given(indexes(), worlds, schedules)
    @settings(deadline=None)
    def test_an_epoch_has_every_visit_once_for_any_world_and_batch_size(
        self, index: DataIndex, world_size: int, schedule: Schedule
    ) -> None:
        loaders, seen, calls = ranks(index, world_size), [], 0
        while True:
            outcome = together(run(loaders, schedule, 1, calls)[0])
            calls += 1
            if isinstance(outcome, EpochEnd):
                break
            assert isinstance(outcome, tuple)
            seen += [(sample.dataset, sample.path) for sample in outcome[0]]
        expected = Counter({(found.id, item.path): item.visits for found in index.datasets for item in found.items})
        assert Counter(seen) == expected
        assert outcome.samples == expected.total()
        assert outcome.batches == calls - 1

    def test_shares_differ_by_at_most_one_and_none_is_empty(self) -> None:
        index = made_up({"counts": [7]})
        batches = [loader.next_batch(2) for loader in ranks(index, 4)]
        assert [len(batch.samples) for batch in batches if isinstance(batch, BatchRef)] == [1, 2, 2, 2]

    def test_a_rank_without_a_sample_takes_part_without_weight(self) -> None:
        index = made_up({"counts": [2], "loss_weight": 0.7})
        batches = [batch for loader in ranks(index, 3) if isinstance(batch := loader.next_batch(1), BatchRef)]
        assert [batch.padding for batch in batches] == [True, False, False]
        assert [batch.samples[0].loss_weight for batch in batches] == [0.0, 0.7, 0.7]
        assert {batch.global_samples for batch in batches} == {2}

    @given(indexes(), st.lists(st.tuples(worlds, st.integers(1, 4), st.integers(1, 5)), min_size=2, max_size=5))
    @settings(deadline=None)
    def test_changing_the_number_of_ranks_loses_and_repeats_nothing(
        self, index: DataIndex, legs: list[tuple[int, int, int]]
    ) -> None:
        """Each part of the run has its own number of ranks and batch size, and may stop anywhere."""
        state: dict[str, Any] | None = None
        seen: list[int] = []
        epochs: dict[int, Counter[tuple[str, str]]] = {}
        for world_size, size, calls in legs:
            loaders = ranks(index, world_size)
            for loader in loaders:
                if state is not None:
                    loader.load_state_dict(state)
            for outcomes in run(loaders, [size], calls):
                joined = together(outcomes)
                if isinstance(joined, tuple):
                    seen += joined[1]
                    first = outcomes[0]
                    assert isinstance(first, BatchRef)
                    epoch = epochs.setdefault(first.epoch, Counter())
                    epoch.update((sample.dataset, sample.path) for sample in joined[0])
            states = [loader.state_dict() for loader in loaders]
            assert all(one == states[0] for one in states)
            state = json.loads(json.dumps(states[0]))
        assert seen == list(range(len(seen)))
        visits = {(found.id, item.path): item.visits for found in index.datasets for item in found.items}
        *complete, last = (epochs[number] for number in sorted(epochs))
        assert all(epoch == visits for epoch in complete)
        assert all(count <= visits[key] for key, count in last.items())


class TestResuming:
    @given(indexes(), worlds, schedules, st.integers(0, 25))
    @settings(deadline=None)
    def test_continues_exactly_where_it_stopped(
        self, index: DataIndex, world_size: int, schedule: Schedule, done: int
    ) -> None:
        loaders = ranks(index, world_size)
        run(loaders, schedule, done)
        states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
        rest = run(loaders, schedule, 20, start=done)
        resumed = ranks(index, world_size)
        for loader, state in zip(resumed, states, strict=True):
            assert loader.load_state_dict(state) == ()
        assert run(resumed, schedule, 20, start=done) == rest

    def test_looking_ahead_is_not_part_of_the_state(self) -> None:
        index = made_up({"counts": [5, 3]})
        loader = Loader(index, batch_size=2)
        before = loader.state_dict()
        loader.peek(5)
        assert loader.state_dict() == before

    @pytest.mark.parametrize(
        ("other", "seed", "message"),
        [
            ({"counts": [6]}, 7, "dataset d0: 5 samples then, 6 now"),
            ({"counts": [5], "repeats": 1}, 7, "dataset d0: other buckets or visits, other settings"),
            ({"counts": [5]}, 8, "training.seed was 7 and is 8"),
        ],
    )
    def test_other_data_is_rejected_unless_allowed(self, other: dict[str, Any], seed: int, message: str) -> None:
        loader = Loader(made_up({"counts": [5]}), batch_size=2)
        loader.next_batch()
        resumed = Loader(made_up(other, seed=seed), batch_size=2)
        with pytest.raises(OtherDataError) as error:
            resumed.load_state_dict(loader.state_dict())
        assert message in str(error.value)
        assert "--allow-other-data" in str(error.value)
        assert resumed.state_dict()["consumed"] == 0
        assert resumed.load_state_dict(loader.state_dict(), allow_other_data=True) == (message,)
        assert resumed.state_dict()["consumed"] == 2

    def test_with_fewer_files_the_epoch_just_ends_earlier(self) -> None:
        loader = Loader(made_up({"counts": [9]}), batch_size=8)
        loader.next_batch()
        resumed = Loader(made_up({"counts": [4]}), batch_size=8)
        resumed.load_state_dict(loader.state_dict(), allow_other_data=True)
        assert isinstance(resumed.next_batch(), EpochEnd)
        assert isinstance(resumed.next_batch(), BatchRef)

    def test_a_state_of_another_version_is_rejected(self) -> None:
        loader = Loader(made_up({"counts": [5]}), batch_size=2)
        with pytest.raises(DataError, match=r"version 1.*--resume none"):
            loader.load_state_dict({**loader.state_dict(), "version": 1})


@st.composite
def damages(draw: st.DrawFn) -> tuple[DataIndex, list[tuple[int, str, str]]]:
    """An index and its damaged files: after how many batches each is found, and in which dataset."""
    index = draw(indexes())
    files = [(found.id, item.path) for found in index.datasets for item in found.items[1:]]  # one of each stays
    chosen = draw(st.lists(st.sampled_from(files), unique=True, max_size=4)) if files else []
    return index, sorted((draw(st.integers(0, 12)), *file) for file in chosen)


class TestExcluding:
    @given(damages(), worlds, schedules, st.integers(0, 14))
    @settings(deadline=None)
    def test_the_rest_of_a_resumed_run_is_the_same(
        self, damage: tuple[DataIndex, list[tuple[int, str, str]]], world_size: int, schedule: Schedule, done: int
    ) -> None:
        index, bad = damage
        loaders = ranks(index, world_size)

        def go_on(some: list[Loader], start: int, calls: int) -> list[list[Outcome]]:
            outcomes = []
            for call in range(start, start + calls):
                for loader in some:
                    for when, dataset, path in bad:
                        if when == call:
                            loader.exclude({dataset: {path: "damaged"}})
                outcomes += run(some, schedule, 1, start=call)
            return outcomes

        go_on(loaders, 0, done)
        states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
        rest = go_on(loaders, done, 15)
        resumed = ranks(index, world_size)
        for loader, state in zip(resumed, states, strict=True):
            assert loader.load_state_dict(state) == ()
        assert go_on(resumed, done, 15) == rest
        assert [loader.state_dict() for loader in resumed] == [loader.state_dict() for loader in loaders]

    @given(damages(), worlds, schedules)
    @settings(deadline=None)
    def test_nothing_else_is_lost_or_comes_twice_and_the_order_stays(
        self, damage: tuple[DataIndex, list[tuple[int, str, str]]], world_size: int, schedule: Schedule
    ) -> None:
        index, bad = damage
        loaders, gone, seen, calls = ranks(index, world_size), set[tuple[str, str]](), [], 0
        while True:
            for when, dataset, path in bad:
                if when == calls:
                    gone.add((dataset, path))
                    for loader in loaders:
                        loader.exclude({dataset: {path: "damaged"}})
            outcome = together(run(loaders, schedule, 1, calls)[0])
            calls += 1
            if not isinstance(outcome, tuple):
                break
            batch = [(sample.dataset, sample.path) for sample in outcome[0]]
            assert not gone.intersection(batch)
            seen += batch
        expected = Counter({(found.id, item.path): item.visits for found in index.datasets for item in found.items})
        found = Counter(seen)
        assert {key: count for key, count in found.items() if key not in gone} == {
            key: count for key, count in expected.items() if key not in gone
        }
        assert all(found[key] <= expected[key] for key in gone)

    def test_the_others_keep_their_order(self) -> None:
        index = made_up({"counts": [30], "corrupt_threshold": 0.5})
        whole = self.paths(Loader(index, batch_size=1))
        loader = Loader(index, batch_size=1)
        loader.exclude({"d0": {whole[3]: "damaged", whole[20]: "damaged"}})
        assert self.paths(loader) == [path for path in whole if path not in (whole[3], whole[20])]

    def paths(self, loader: Loader) -> list[str]:
        found = []
        while isinstance(batch := loader.next_batch(), BatchRef):
            found += [sample.path for sample in batch.samples]
        return found

    def test_too_many_change_nothing(self) -> None:
        loader = Loader(made_up({"counts": [10], "corrupt_threshold": 0.1}), batch_size=2)
        first = loader.index.datasets[0].items[0].path
        loader.next_batch()
        loader.exclude({"d0": {first: "damaged"}})
        before, coming = loader.state_dict(), loader.peek(3)
        others = {item.path: "damaged too" for item in loader.index.datasets[0].items[:2]}
        with pytest.raises(UnreadableFilesError, match="damaged too"):
            loader.exclude({"d0": others})
        assert (loader.state_dict(), loader.peek(3)) == (before, coming)
        assert before["excluded"] == {"d0": {first: "damaged"}}
        assert first not in {item.path for item in loader.index.datasets[0].items}

    def test_a_dataset_of_which_nothing_is_left_stops_the_run(self) -> None:
        loader = Loader(made_up({"counts": [1], "corrupt_threshold": 1.0}), batch_size=1)
        with pytest.raises(UnreadableFilesError, match="1 of 1"):
            loader.exclude({"d0": {loader.index.datasets[0].items[0].path: "damaged"}})

    def test_changed_data_resets_the_exclusions(self) -> None:
        """The damaged file may have been repaired, which is the change."""
        loader = Loader(made_up({"counts": [5], "corrupt_threshold": 0.5}), batch_size=1)
        loader.exclude({"d0": {loader.index.datasets[0].items[0].path: "damaged"}})
        resumed = Loader(made_up({"counts": [6]}), batch_size=1)
        resumed.load_state_dict(loader.state_dict(), allow_other_data=True)
        assert len(resumed.index.datasets[0].items) == 6
        assert resumed.state_dict()["excluded"] == {}


class TestLookingAhead:
    @given(indexes(), worlds, schedules, st.integers(1, 6))
    @settings(deadline=None)
    def test_peek_matches_the_next_calls_and_changes_nothing(
        self, index: DataIndex, world_size: int, schedule: Schedule, depth: int
    ) -> None:
        plain, curious = (Loader(index, batch_size=2, world_size=world_size) for _ in range(2))
        for call in range(25):
            size = schedule[call % len(schedule)]
            foreseen = curious.peek(depth, size)
            assert len(foreseen) == depth
            outcome = curious.next_batch(size)
            assert outcome is foreseen[0]
            assert outcome == plain.next_batch(size)

    def test_peeked_batches_are_not_computed_again(self) -> None:
        loader = Loader(made_up({"counts": [9]}), batch_size=2)
        first, second, third = loader.peek(3)
        assert loader.next_batch() is first
        assert loader.peek(2) == (second, third)
        assert loader.peek(2)[0] is second

    def test_peeked_batches_of_another_size_are_discarded(self) -> None:
        index = made_up({"counts": [20, 9]})
        plain, curious = Loader(index, batch_size=2), Loader(index, batch_size=2)
        for size in (2, 3, 2, 2, 1, 2):
            assert curious.next_batch(size) == plain.next_batch(size)
            curious.peek(4, 2)

    def test_peek_is_empty_when_no_dataset_is_active(self) -> None:
        loader = Loader(made_up({"counts": [2], "end_epoch": 1}), batch_size=2)
        foreseen = loader.peek(5)
        assert [type(outcome) for outcome in foreseen] == [BatchRef, EpochEnd]


class TestTheEnd:
    def test_end_of_epoch_is_a_value_and_the_next_call_starts_another(self) -> None:
        loader = Loader(made_up({"counts": [3, 2]}), batch_size=2)
        outcomes = [loader.next_batch() for _ in range(5)]
        assert [type(outcome) for outcome in outcomes] == [BatchRef] * 3 + [EpochEnd, BatchRef]
        assert outcomes[3] == EpochEnd(epoch=0, samples=5, batches=3, short_batches=1)
        last = outcomes[4]
        assert isinstance(last, BatchRef)
        assert last.epoch == 1
        assert last.indexes == (5, 6)

    def test_end_of_run_is_returned_by_every_further_call(self) -> None:
        loader = Loader(made_up({"counts": [2]}), batch_size=2, epochs=2)
        outcomes = [loader.next_batch() for _ in range(6)]
        assert [type(outcome) for outcome in outcomes] == [BatchRef, EpochEnd, BatchRef, EpochEnd, Exhausted, Exhausted]
        assert outcomes[-1] == Exhausted(epochs=2, samples=4)

    def test_no_active_dataset_is_an_error_with_their_periods(self) -> None:
        index = made_up({"counts": [2], "end_step": 3}, {"counts": [2], "start_step": 100})
        loader = Loader(index, batch_size=2)
        assert isinstance(loader.next_batch(step=0), BatchRef)
        assert isinstance(loader.next_batch(step=5), EpochEnd)
        with pytest.raises(DataError, match="no dataset is active in epoch 2 after step 5") as error:
            loader.next_batch(step=5)
        assert "d1: epochs 1 to the last, steps 100 to the last" in str(error.value)
        assert isinstance(loader.next_batch(step=100), BatchRef)


class TestSteps:
    def test_steps_decide_which_datasets_are_active(self) -> None:
        index = made_up({"counts": [6], "end_step": 2}, {"counts": [6], "start_step": 2})
        loader = Loader(index, batch_size=1)
        seen = []
        for step in range(5):
            loader.peek(3, step=step)
            batch = loader.next_batch(step=step)
            assert isinstance(batch, BatchRef)
            seen.append(batch.samples[0].dataset)
        assert seen == ["d0", "d0", "d1", "d1", "d1"]

    def test_epochs_decide_which_datasets_are_active(self) -> None:
        index = made_up({"counts": [2], "end_epoch": 1}, {"counts": [3], "start_epoch": 2})
        loader = Loader(index, batch_size=1, epochs=2)
        ends: list[EpochEnd] = []
        while not isinstance(outcome := loader.next_batch(), Exhausted):
            ends += [outcome] if isinstance(outcome, EpochEnd) else []
        assert [end.samples for end in ends] == [2, 3]


class TestSizes:
    def test_the_default_size_is_the_run_s(self) -> None:
        index = made_up({"counts": [9]}, {"counts": [9], "batch_size": 5})
        loader = Loader(index, batch_size=2)
        sizes = {
            (batch.samples[0].dataset, len(batch.samples))
            for _ in range(4)
            if isinstance(batch := loader.next_batch(), BatchRef)
        }
        assert {("d0", 2), ("d1", 5)} >= sizes

    @pytest.mark.parametrize(
        "wrong",
        [
            lambda index: Loader(index, batch_size=1, rank=2, world_size=2),
            lambda index: Loader(index, batch_size=1, rank=-1, world_size=2),
            lambda index: Loader(index, batch_size=1).next_batch(0),
            lambda index: Loader(index, batch_size=1).peek(1, -3),
        ],
    )
    def test_invalid_arguments_are_rejected(self, wrong: Callable[[DataIndex], object]) -> None:
        with pytest.raises(ValueError, match=r"rank|micro-batch"):
            wrong(made_up({"counts": [3]}))


def test_two_seeds_give_two_orders_and_one_seed_gives_one() -> None:
    def paths(seed: int) -> list[str]:
        loader = Loader(made_up({"counts": [30]}, seed=seed), batch_size=1)
        return [batch.samples[0].path for _ in range(30) if isinstance(batch := loader.next_batch(), BatchRef)]

    assert paths(1) == paths(1) != paths(2)


# -- datasets in turn, and batches that are filled ---------------------------------------------------------------------


@st.composite
def mixed(draw: st.DrawFn) -> DataIndex:
    """Datasets with `even_steps` or `turn`, with and without filled batches."""
    datasets = [
        {
            "counts": draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)),
            "repeats": draw(st.integers(0, 1)),
            "even_steps": position > 0 and draw(st.booleans()),
            "turn": draw(st.one_of(st.none(), st.integers(0, 2))),
            "corrupt_threshold": 1.0,
        }
        for position in range(draw(st.integers(1, 4)))
    ]
    mixing = BatchMixing(draw(st.booleans()), draw(st.booleans()), tuple(draw(st.lists(st.integers(3, 9), max_size=2))))
    return replace(made_up(*datasets, seed=draw(st.integers(0, 50))), mixing=mixing)


def walk(loaders: list[Loader], steps: int, per_step: int, begin: int = 0) -> list[list[Outcome]]:
    """The results of all ranks in several steps of several batches, call by call."""
    found: list[list[Outcome]] = []
    for step in range(begin, begin + steps):
        batches = 0
        while batches < per_step:
            outcomes = [loader.next_batch(2, step=step) for loader in loaders]
            batches += isinstance(outcomes[0], BatchRef)
            found.append(outcomes)
    return found


class TestMixing:
    @settings(max_examples=25, deadline=None)
    @given(mixed(), st.integers(0, 12), st.integers(1, 3), worlds)
    def test_a_resumed_run_continues_exactly(
        self, index: DataIndex, before: int, per_step: int, world_size: int
    ) -> None:
        whole = ranks(index, world_size)
        walk(whole, before, per_step)
        state = json.loads(json.dumps(whole[0].state_dict()))
        resumed = ranks(index, world_size)
        for loader in resumed:
            loader.load_state_dict(state)
        assert walk(resumed, 10, per_step, before) == walk(whole, 10, per_step, before)

    @settings(max_examples=25, deadline=None)
    @given(mixed(), st.integers(1, 3), st.integers(1, 12))
    def test_peek_over_several_steps_matches_the_next_calls(self, index: DataIndex, per_step: int, depth: int) -> None:
        plain, foreseeing = Loader(index, batch_size=2), Loader(index, batch_size=2)
        for step in range(12):
            done = 0
            while done < per_step:
                coming = foreseeing.peek(depth, 2, step=step, per_step=per_step, done=done)
                ahead = Loader(index, batch_size=2)
                ahead.load_state_dict(plain.state_dict())
                expected: list[Outcome] = []
                at, batches = step, done
                while len(expected) < depth:
                    outcome = ahead.next_batch(2, step=at)
                    batches += isinstance(outcome, BatchRef)
                    expected.append(outcome)
                    at = step + batches // per_step
                assert [*coming] == expected
                first = foreseeing.next_batch(2, step=step)
                assert first == plain.next_batch(2, step=step) == expected[0]
                done += isinstance(first, BatchRef)

    @settings(max_examples=25, deadline=None)
    @given(mixed(), worlds)
    def test_mixed_ranks_together_equal_one_rank(self, index: DataIndex, world_size: int) -> None:
        alone = ranks(index, 1)[0]
        sizes = [alone.next_batch(2 * world_size, step=step) for step in range(20)]
        shared = [[loader.next_batch(2, step=step) for loader in loaders] for loaders in [ranks(index, world_size)]
                  for step in range(20)]  # fmt: skip
        assert [together(outcomes) for outcomes in shared] == [together([outcome]) for outcome in sizes]

    @settings(max_examples=25, deadline=None)
    @given(mixed())
    def test_steps_and_datasets(self, index: DataIndex) -> None:
        """Even steps have samples of their datasets only, and each comes once before any comes again."""
        loader = Loader(index, batch_size=1)
        even = {one.id for one in index.datasets if one.dataset.even_steps}
        seen: dict[str, list[str]] = {}
        for step in range(40):
            while not isinstance(outcome := loader.next_batch(1, step=step), BatchRef):
                pass
            (sample,) = outcome.samples
            seen.setdefault(sample.dataset, []).append(sample.path)
            if even:
                assert (sample.dataset in even) == index.mixing.is_even_turn(step)
        for one in index.datasets:
            paths, visits = seen.get(one.id, []), sum(item.visits for item in one.items)
            whole = [Counter(paths[at : at + visits]) for at in range(0, len(paths) - visits + 1, visits)]
            expected = Counter({item.path: item.visits for item in one.items})
            assert not one.dataset.even_steps or all(found == expected for found in whole)

    @settings(max_examples=25, deadline=None)
    @given(mixed(), st.integers(0, 10))
    def test_excluding_a_file_loses_nothing_else(self, index: DataIndex, before: int) -> None:
        loader = Loader(index, batch_size=2)
        walk([loader], before, 1)
        victim = index.datasets[-1].items[0].path
        if len(index.datasets[-1].items) > 1:
            loader.exclude({index.datasets[-1].id: {victim: "damaged"}})
            after = [outcome for (outcome,) in walk([loader], 20, 1, before) if isinstance(outcome, BatchRef)]
            assert all(sample.path != victim for batch in after for sample in batch.samples)

    def test_filled_batches_have_the_size_asked_for_and_noise_of_their_own(self) -> None:
        index = replace(made_up({"counts": [1, 3]}), mixing=BatchMixing(fill=True))
        loader = Loader(index, batch_size=4, epochs=1)
        batches = [loader.next_batch(), loader.next_batch()]
        assert [len(batch.samples) for batch in batches if isinstance(batch, BatchRef)] == [4, 4]
        assert [index for batch in batches if isinstance(batch, BatchRef) for index in batch.indexes] == [*range(8)]
        assert loader.next_batch() == EpochEnd(0, samples=8, batches=2, short_batches=0)
        alone = next(batch for batch in batches if isinstance(batch, BatchRef) and batch.bucket.width == 64)
        assert len({sample.path for sample in alone.samples}) == 1
