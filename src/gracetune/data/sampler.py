"""The order in which a run visits its samples. Pure functions: (seed, epoch, position) gives the same batch everywhere.

An epoch visits every sample of every active dataset 1 + `repeats` times. A batch is chosen in two random steps:

1. a dataset, weighted by its `probability` and its number of visits
2. one of its groups (samples of one shape), weighted by the visits left in it

Inside a group the order is shuffled for every epoch and round. Excluding a sample does not change the order of the
others. A batch is chosen for all ranks together, so the order does not depend on their number. The last samples of a
group form a smaller batch, or are filled up with other samples of the group.

Datasets with `even_steps` provide every second optimizer step and have epochs of their own, which start over whenever
the dataset is used up. Datasets with a `turn` alternate batch by batch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, compress, cycle, islice

import numpy as np
import numpy.typing as npt

from gracetune.data.refs import Bucket
from gracetune.seeded_random import below, ordered, uniform


@dataclass(frozen=True)
class OrderSource:
    """The settings of a dataset that affect the order."""

    id: str
    probability: float = 1.0
    batch_size: int | None = None
    """The dataset's own micro-batch size; None uses the run's."""
    start_epoch: int = 1
    """Counted from 1, as in a config file, unlike all other epoch numbers here."""
    end_epoch: int | None = None
    """The last epoch, counted from 1; None means no end."""
    start_step: int = 0
    end_step: int | None = None
    """The first step without the dataset; None means no end."""
    even_steps: bool = False
    """Provide every second optimizer step."""
    turn: int | None = None
    """The position among the datasets that alternate; None comes last."""

    def active(self, epoch: int, step: int) -> bool:
        """Whether the dataset is active in this epoch (counted from 0) after `step` optimizer steps."""
        started = epoch + 1 >= self.start_epoch and step >= self.start_step
        ended = (self.end_epoch is not None and epoch + 1 > self.end_epoch) or (
            self.end_step is not None and step >= self.end_step
        )
        return started and not ended

    @property
    def period(self) -> str:
        """The active period as text for messages."""
        epochs = f"epochs {self.start_epoch} to {self.end_epoch or 'the last'}"
        steps = f"steps {self.start_step} to {self.end_step or 'the last'}"
        return f"{self.id}: {epochs}, {steps}"


@dataclass(frozen=True)
class BatchMixing:
    """How batches are composed in a run."""

    fill: bool = False
    """Fill up batches for which too few samples are left."""
    equal: bool = False
    """Weight datasets by their `probability` only, not by their size."""
    other_steps: tuple[int, ...] = ()
    """The datasets with `even_steps` skip steps that are multiples of any of these."""

    def is_even_turn(self, step: int) -> bool:
        """Whether the datasets with `even_steps` provide the batch after `step` optimizer steps."""
        return step % 2 == 0 and all(step % every for every in self.other_steps)


MIXED_BY_SIZE = BatchMixing()


@dataclass(frozen=True)
class SampleGroup:
    """The samples of one dataset that can share a batch."""

    source: int
    """The position of the dataset."""
    shape: tuple[Bucket, ...]
    """The bucket of the samples, and the buckets of their references."""
    samples: tuple[int, ...]
    """Positions in the dataset."""
    visits: tuple[int, ...]
    """Visits per epoch of each sample."""
    names: tuple[int, ...]
    """A 64-bit identifier of each sample that depends on nothing else, so that the random order survives changes."""

    @property
    def total(self) -> int:
        return sum(self.visits)

    @property
    def name(self) -> str:
        """A name that depends only on the shape. It identifies the group in saved states and seeds its order."""
        return "+".join(
            "x".join(str(side) for side in (b.width, b.height, b.frames, b.audio_samples, b.audio_channels))
            for b in self.shape
        )


@dataclass(frozen=True)
class Cursor:
    """The position of a run. Everything else follows from the seed."""

    taken: tuple[int, ...]
    """Visits taken from each group in this epoch; for groups with `even_steps`, since the start of the run."""
    epoch: int = 0
    consumed: int = 0
    """Samples returned since the start of the run, which is the next global sample index."""
    batches: int = 0
    """Batches of this epoch, each for all ranks together."""
    short: int = 0
    """Batches of this epoch that were smaller than requested."""
    began: int = 0
    """`consumed` at the start of the epoch."""


@dataclass(frozen=True)
class Visit:
    """One visit of a sample."""

    sample: int
    """The sample's position in its dataset."""
    round: int
    """0 for the first visit in an epoch, 1 for the second, and so on."""


@dataclass(frozen=True)
class GlobalBatch:
    """A batch for all ranks together."""

    source: int
    """The position of the dataset."""
    shape: tuple[Bucket, ...]
    visits: tuple[Visit, ...]
    first_index: int
    """The global sample index of the first visit."""
    passed: int | None = None
    """Completed passes over the dataset, if it has epochs of its own."""


class Order:
    """The order of a run's samples. It holds no position: methods take a `Cursor` and return a new one."""

    def __init__(
        self,
        sources: Sequence[OrderSource],
        groups: Iterable[SampleGroup],
        *,
        seed: int,
        batch_size: int,
        mixing: BatchMixing = MIXED_BY_SIZE,
    ) -> None:
        self.sources = tuple(sources)
        self.groups = tuple(groups)
        self.seed, self.batch_size, self.mixing = seed, batch_size, mixing
        self.alternates = any(source.even_steps for source in self.sources)
        """Whether datasets alternate by optimizer step (`even_steps`)."""
        self._takes_turns = any(source.turn is not None for source in self.sources)
        self._members = tuple(
            tuple(number for number, group in enumerate(self.groups) if group.source == position)
            for position in range(len(self.sources))
        )
        self._totals = tuple(group.total for group in self.groups)
        self._weights = tuple(
            source.probability * (1 if self.mixing.equal else sum(self._totals[number] for number in members))
            for source, members in zip(self.sources, self._members, strict=True)
        )
        self._ends = tuple(_round_ends(group) for group in self.groups)
        # Room for two rounds of each group: the current one, and the next for looking ahead.
        self._round = lru_cache(maxsize=2 * max(1, len(self.groups)))(self._make_round)

    def start(self) -> Cursor:
        return Cursor(taken=(0,) * len(self.groups))

    def visits(self, position: int) -> int:
        """Visits per epoch of the dataset at this position."""
        return sum(self._totals[number] for number in self._members[position])

    def size(self, position: int, size: int) -> int:
        """A dataset's micro-batch size per rank if the run's is `size`. Its own size scales with it in a batch ramp."""
        own = self.sources[position].batch_size
        # size * own / batch_size, rounded half up in integers.
        return size if own is None else max(1, (2 * size * own + self.batch_size) // (2 * self.batch_size))

    def active(self, epoch: int, step: int) -> tuple[bool, ...]:
        """Which datasets may provide the next batch.

        If only datasets with `even_steps` are active, they provide every step.
        """
        within = tuple(source.active(epoch, step) for source in self.sources)
        others = [active for active, source in zip(within, self.sources, strict=True) if not source.even_steps]
        if not self.alternates or not any(others):
            return within
        turn = self.mixing.is_even_turn(step)
        return tuple(
            active and source.even_steps == turn for active, source in zip(within, self.sources, strict=True)
        )  # fmt: skip

    def next_batch(self, cursor: Cursor, size: int, step: int, world_size: int) -> tuple[GlobalBatch, Cursor] | None:
        """The next batch and the cursor after it; None if the epoch has no samples left."""
        taken_in_epoch, passed = self._in_epoch(cursor)
        left = [total - taken for total, taken in zip(self._totals, taken_in_epoch, strict=True)]
        candidates = [
            position
            for position, active in enumerate(self.active(cursor.epoch, step))
            if active and any(left[number] for number in self._members[position])
        ]
        if not candidates:
            return None
        index = sum(cursor.taken)
        position = self._choose_source(self._in_turn(candidates, cursor.batches), cursor.epoch, index)
        number = self._choose_group(position, left, cursor.epoch, index)
        wanted = self.size(position, size) * world_size
        count, begin, passes = min(wanted, left[number]), taken_in_epoch[number], passed[position]
        epoch = cursor.epoch if passes is None else passes
        visits = self._visits(epoch, number, begin, begin + count)
        if self.mixing.fill:
            visits += self._fillers(epoch, number, wanted - count)
        taken = (*cursor.taken[:number], cursor.taken[number] + count, *cursor.taken[number + 1 :])
        after = replace(
            cursor, taken=taken, consumed=cursor.consumed + len(visits), batches=cursor.batches + 1,
            short=cursor.short + (len(visits) < wanted),
        )  # fmt: skip
        return GlobalBatch(position, self.groups[number].shape, visits, cursor.consumed, passes), after

    def _in_epoch(self, cursor: Cursor) -> tuple[Sequence[int], Sequence[int | None]]:
        """The visits taken from each group in its current epoch, and the completed passes over each dataset.

        The passes are None for datasets that follow the run's epochs.
        """
        if not self.alternates:
            return cursor.taken, (None,) * len(self.sources)
        passed = [self._passed(cursor, position) for position in range(len(self.sources))]
        taken_in_epoch = [
            taken - (passed[group.source] or 0) * total
            for taken, total, group in zip(cursor.taken, self._totals, self.groups, strict=True)
        ]
        return taken_in_epoch, passed

    def _passed(self, cursor: Cursor, position: int) -> int | None:
        """Completed passes over a dataset with epochs of its own: every group has been visited that often."""
        if not self.sources[position].even_steps:
            return None
        counts = [(cursor.taken[number], self._totals[number]) for number in self._members[position]]
        return min((taken // total for taken, total in counts if total), default=0)

    def _visits(self, epoch: int, number: int, begin: int, end: int) -> tuple[Visit, ...]:
        """The visits from `begin` to `end` in a group's order for the epoch."""
        return tuple(
            Visit(int(sample), round_number)
            for round_number, samples in self._rounds(epoch, number, begin, end)
            for sample in samples
        )  # fmt: skip

    def _fillers(self, epoch: int, number: int, count: int) -> tuple[Visit, ...]:
        """Visits that fill up a batch: the first ones of the group's epoch, repeated if there are too few."""
        if count < 1:
            return ()
        first = self._visits(epoch, number, 0, min(count, self._totals[number]))
        return tuple(islice(cycle(first), count))

    def _in_turn(self, candidates: list[int], batches: int) -> list[int]:
        """The candidates whose turn it is after this number of batches."""
        if not self._takes_turns:
            return candidates
        turns = {position: self.sources[position].turn for position in candidates}
        sequence = sorted({*turns.values()}, key=lambda turn: (turn is None, turn or 0))
        return [position for position, turn in turns.items() if turn == sequence[batches % len(sequence)]]

    def next_epoch(self, cursor: Cursor) -> Cursor:
        """The cursor at the start of the next epoch. Datasets with epochs of their own continue where they are."""
        taken = tuple(
            taken if self.sources[group.source].even_steps else 0
            for taken, group in zip(cursor.taken, self.groups, strict=True)
        )
        return Cursor(taken, epoch=cursor.epoch + 1, consumed=cursor.consumed, began=cursor.consumed)

    def visited_samples(self, cursor: Cursor, number: int) -> npt.NDArray[np.int64]:
        """The samples of a group visited so far in its current epoch, one entry per visit."""
        taken_in_epoch, passed = self._in_epoch(cursor)
        passes = passed[self.groups[number].source]
        rounds = self._rounds(cursor.epoch if passes is None else passes, number, 0, taken_in_epoch[number])
        return np.concatenate([np.empty(0, np.int64), *(samples for _, samples in rounds)])

    def without(self, cursor: Cursor, gone: Mapping[int, Sequence[int]]) -> tuple[Order, tuple[int, ...]]:
        """The order without excluded samples, and the `Cursor.taken` that belongs to it.

        `gone` maps the position of a dataset to the sorted positions of its excluded samples. The positions of later
        samples move up.
        """
        groups: list[SampleGroup] = []
        taken: list[int] = []
        for number, group in enumerate(self.groups):
            lost = np.array(gone.get(group.source, ()), np.int64)
            samples = np.array(group.samples, np.int64)
            kept = ~np.isin(samples, lost)
            if not kept.any():
                continue
            if not len(lost):
                groups.append(group)
                taken.append(cursor.taken[number])
                continue
            left = samples[kept]
            chosen = kept.tolist()
            remaining = replace(
                group,
                # Each position moves up by the number of excluded samples before it.
                samples=tuple((left - np.searchsorted(lost, left)).tolist()),
                visits=tuple(compress(group.visits, chosen)),
                names=tuple(compress(group.names, chosen)),
            )
            groups.append(remaining)
            visited = self.visited_samples(cursor, number)
            passed = self._passed(cursor, group.source) or 0
            taken.append(passed * remaining.total + len(visited) - int(np.isin(visited, lost).sum()))
        order = Order(self.sources, groups, seed=self.seed, batch_size=self.batch_size, mixing=self.mixing)
        return order, tuple(taken)

    def whole_epoch(self, epoch: int, size: int, step: int, world_size: int) -> Cursor:
        """The cursor after an epoch of batches of this size. Plans use its `batches` and `short`."""
        if self.alternates:
            return self._walk_epoch(epoch, size, step, world_size)
        active = self.active(epoch, step)
        # Whatever the order, each group yields its full batches and at most one smaller batch.
        taken = tuple(group.total if active[group.source] else 0 for group in self.groups)
        full = [self.size(group.source, size) * world_size for group in self.groups]
        return Cursor(
            taken,
            epoch,
            consumed=sum(taken),
            batches=sum(-(-visits // wanted) for visits, wanted in zip(taken, full, strict=True)),
            short=0
            if self.mixing.fill
            else sum(visits % wanted > 0 for visits, wanted in zip(taken, full, strict=True)),
        )

    def _walk_epoch(self, epoch: int, size: int, step: int, world_size: int) -> Cursor:
        """The same by simulation, for datasets that alternate by step, assuming one batch per step."""
        cursor = replace(self.start(), epoch=epoch)
        while (batch := self.next_batch(cursor, size, step + cursor.batches, world_size)) is not None:
            cursor = batch[1]
        return cursor

    def _choose_source(self, candidates: list[int], epoch: int, index: int) -> int:
        """Choose a dataset at random by weight. `index` counts visits, so the choice differs for every batch."""
        if len(candidates) == 1:
            return candidates[0]
        ticket = uniform(self.seed, "dataset", epoch, index) * sum(self._weights[position] for position in candidates)
        for position in candidates:
            ticket -= self._weights[position]
            if ticket < 0:
                return position
        return candidates[-1]  # reached only if the sum of the weights was rounded up

    def _choose_group(self, position: int, left: list[int], epoch: int, index: int) -> int:
        """Choose a group of the dataset at random, weighted by the visits left."""
        members = [number for number in self._members[position] if left[number]]
        ticket = below(sum(left[number] for number in members), self.seed, "group", epoch, index)
        for number in members:
            ticket -= left[number]
            if ticket < 0:
                return number
        raise AssertionError("unreachable: the ticket is below the sum of all weights")

    def _rounds(self, epoch: int, number: int, begin: int, end: int) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """The visits from `begin` to `end` of a group's epoch, by round.

        An epoch consists of rounds: every sample is visited once before any is visited a second time.
        """
        ends = self._ends[number]
        for round_number in range(bisect_right(ends, begin), bisect_left(ends, end) + 1 if begin < end else 0):
            start = ends[round_number - 1] if round_number else 0
            yield round_number, self._round(epoch, number, round_number)[max(0, begin - start) : end - start]

    def _make_round(self, epoch: int, number: int, round_number: int) -> npt.NDArray[np.int64]:
        """The samples of one round of a group, in random order: those with more than `round_number` visits."""
        group = self.groups[number]
        among = np.array(group.visits, np.int64) > round_number
        source = self.sources[group.source].id
        names = np.array(group.names, np.uint64)[among]
        order = ordered(names, self.seed, "order", source, group.name, epoch, round_number)
        return np.array(group.samples, np.int64)[among][order]


def _round_ends(group: SampleGroup) -> Sequence[int]:
    """The cumulative number of visits at the end of each round. Equal rounds (`repeats`) use a `range`, not a list."""
    count, most = len(group.visits), max(group.visits, default=0)
    if count and most == min(group.visits):
        return range(count, count * most + 1, count)
    return [*accumulate(sum(visits > earlier for visits in group.visits) for earlier in range(most))]
