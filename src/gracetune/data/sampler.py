"""In which order a run visits its samples. Pure: the same (seed, epoch, position) gives the same batch on every rank.

An epoch visits every sample of every dataset that is active in it, 1 + `repeats` times. A batch is drawn in two steps:
a dataset, in proportion to its `probability` and its visits, then one of its groups (samples of one shape), in
proportion to what is left of it. Inside a group the order is shuffled anew for every epoch and round; a sample that is
taken out changes nothing about the order of the others. Batches are drawn for all ranks together, so the order does not
know how many there are; what is left of a group makes a smaller batch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, compress

import numpy as np
import numpy.typing as npt

from gracetune.data.refs import Bucket
from gracetune.seeded_random import below, ordered, uniform


@dataclass(frozen=True)
class Source:
    """A dataset as far as the order is concerned."""

    id: str
    probability: float = 1.0
    batch_size: int | None = None
    """Its own micro-batch; None takes the run's."""
    start_epoch: int = 1
    """Epochs are counted from 1 here, as in a config file."""
    end_epoch: int | None = None
    start_step: int = 0
    end_step: int | None = None

    def active(self, epoch: int, step: int) -> bool:
        """In the given epoch (counted from 0), before optimizer step `step` + 1."""
        started = epoch + 1 >= self.start_epoch and step >= self.start_step
        ended = (self.end_epoch is not None and epoch + 1 > self.end_epoch) or (
            self.end_step is not None and step >= self.end_step
        )
        return started and not ended

    @property
    def period(self) -> str:
        """In words, for the user."""
        epochs = f"epochs {self.start_epoch} to {self.end_epoch or 'the last'}"
        steps = f"steps {self.start_step} to {self.end_step or 'the last'}"
        return f"{self.id}: {epochs}, {steps}"


@dataclass(frozen=True)
class Group:
    """The samples of one dataset that can share a batch."""

    source: int
    """Position of its dataset."""
    shape: tuple[Bucket, ...]
    """The bucket, and those of the references."""
    samples: tuple[int, ...]
    """Positions in the dataset."""
    visits: tuple[int, ...]
    """Of each sample in one epoch."""
    names: tuple[int, ...]
    """64 bits of each sample's own, the same whatever else there is: the order of the others does not depend on it."""

    @property
    def total(self) -> int:
        return sum(self.visits)

    @property
    def name(self) -> str:
        """The same in every run, whatever else the dataset holds: it names the group in saved states and in draws."""
        return "+".join(
            "x".join(str(side) for side in (b.width, b.height, b.frames, b.audio_samples, b.audio_channels))
            for b in self.shape
        )


@dataclass(frozen=True)
class Cursor:
    """How far a run is; everything else follows from the seed."""

    taken: tuple[int, ...]
    """Visits handed out in this epoch, of each group."""
    epoch: int = 0
    consumed: int = 0
    """Samples handed out since the run began: the next global sample index."""
    batches: int = 0
    """Of this epoch."""
    short: int = 0
    """Batches of this epoch that were smaller than asked for."""


@dataclass(frozen=True)
class Visit:
    """One sample's turn."""

    sample: int
    """Position in its dataset."""
    round: int
    """0 for the first visit in an epoch."""


@dataclass(frozen=True)
class Drawn:
    """A batch of all ranks together."""

    source: int
    shape: tuple[Bucket, ...]
    visits: tuple[Visit, ...]
    first_index: int


class Order:
    """The order of one run's samples."""

    def __init__(self, sources: Sequence[Source], groups: Iterable[Group], *, seed: int, batch_size: int) -> None:
        self.sources = tuple(sources)
        self.groups = tuple(groups)
        self.seed, self.batch_size = seed, batch_size
        self._members = tuple(
            tuple(number for number, group in enumerate(self.groups) if group.source == position)
            for position in range(len(self.sources))
        )
        self._totals = tuple(group.total for group in self.groups)
        self._weights = tuple(
            source.probability * sum(self._totals[number] for number in members)
            for source, members in zip(self.sources, self._members, strict=True)
        )
        self._ends = tuple(_round_ends(group) for group in self.groups)
        # One round of each group, and the next one while looking ahead.
        self._round = lru_cache(maxsize=2 * max(1, len(self.groups)))(self._make_round)

    def start(self) -> Cursor:
        return Cursor(taken=(0,) * len(self.groups))

    def visits(self, position: int) -> int:
        """Of one dataset in an epoch it is active in."""
        return sum(self._totals[number] for number in self._members[position])

    def size(self, position: int, size: int) -> int:
        """A dataset's own micro-batch when the run's is `size`: it grows with the run's in a batch ramp."""
        own = self.sources[position].batch_size
        return size if own is None else max(1, (2 * size * own + self.batch_size) // (2 * self.batch_size))

    def active(self, epoch: int, step: int) -> tuple[bool, ...]:
        return tuple(source.active(epoch, step) for source in self.sources)

    def draw(self, cursor: Cursor, size: int, step: int, world_size: int) -> tuple[Drawn, Cursor] | None:
        """The next batch and the cursor behind it; None where nothing of the epoch is left."""
        left = [total - taken for total, taken in zip(self._totals, cursor.taken, strict=True)]
        open_sources = [
            position
            for position, active in enumerate(self.active(cursor.epoch, step))
            if active and any(left[number] for number in self._members[position])
        ]
        if not open_sources:
            return None
        place = sum(cursor.taken)
        position = self._draw_source(open_sources, cursor.epoch, place)
        number = self._draw_group(position, left, cursor.epoch, place)
        wanted = self.size(position, size) * world_size
        count = min(wanted, left[number])
        begin = cursor.taken[number]
        visits = tuple(
            Visit(int(sample), turn)
            for turn, samples in self._rounds(cursor.epoch, number, begin, begin + count)
            for sample in samples
        )
        taken = (*cursor.taken[:number], begin + count, *cursor.taken[number + 1 :])
        behind = Cursor(
            taken, cursor.epoch, cursor.consumed + count, cursor.batches + 1, cursor.short + (count < wanted)
        )
        return Drawn(position, self.groups[number].shape, visits, cursor.consumed), behind

    def next_epoch(self, cursor: Cursor) -> Cursor:
        return replace(self.start(), epoch=cursor.epoch + 1, consumed=cursor.consumed)

    def handed_out(self, cursor: Cursor, number: int) -> npt.NDArray[np.int64]:
        """The samples of a group that were visited in the cursor's epoch, one for every visit."""
        rounds = self._rounds(cursor.epoch, number, 0, cursor.taken[number])
        return np.concatenate([np.empty(0, np.int64), *(samples for _, samples in rounds)])

    def without(self, cursor: Cursor, gone: Mapping[int, Sequence[int]]) -> tuple[Order, tuple[int, ...]]:
        """The order of what is left, and what of it was handed out in the cursor's epoch.

        `gone` are samples that nobody visits any more: positions in their dataset, sorted, by the dataset's position.
        Those behind them move up.
        """
        groups: list[Group] = []
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
            visited = self.handed_out(cursor, number)
            taken.append(len(visited) - int(np.isin(visited, lost).sum()))
            left = samples[kept]
            chosen = kept.tolist()
            groups.append(
                replace(
                    group,
                    samples=tuple((left - np.searchsorted(lost, left)).tolist()),
                    visits=tuple(compress(group.visits, chosen)),
                    names=tuple(compress(group.names, chosen)),
                )
            )
        return Order(self.sources, groups, seed=self.seed, batch_size=self.batch_size), tuple(taken)

    def whole_epoch(self, epoch: int, size: int, step: int, world_size: int) -> Cursor:
        """The cursor behind an epoch of equal batches: its `batches` and `short` are what a plan wants to know."""
        active = self.active(epoch, step)
        # Whatever order they come in, a group gives full batches and what is left of it.
        taken = tuple(group.total if active[group.source] else 0 for group in self.groups)
        whole = [self.size(group.source, size) * world_size for group in self.groups]
        return Cursor(
            taken,
            epoch,
            consumed=sum(taken),
            batches=sum(-(-visits // wanted) for visits, wanted in zip(taken, whole, strict=True)),
            short=sum(visits % wanted > 0 for visits, wanted in zip(taken, whole, strict=True)),
        )

    def _draw_source(self, candidates: list[int], epoch: int, place: int) -> int:
        if len(candidates) == 1:
            return candidates[0]
        ticket = uniform(self.seed, "dataset", epoch, place) * sum(self._weights[position] for position in candidates)
        for position in candidates:
            ticket -= self._weights[position]
            if ticket < 0:
                return position
        return candidates[-1]  # the sum of the weights was rounded up

    def _draw_group(self, position: int, left: list[int], epoch: int, place: int) -> int:
        members = [number for number in self._members[position] if left[number]]
        ticket = below(sum(left[number] for number in members), self.seed, "group", epoch, place)
        for number in members:
            ticket -= left[number]
            if ticket < 0:
                return number
        raise AssertionError("a ticket below the sum of all belongs to one of them")

    def _rounds(self, epoch: int, number: int, begin: int, end: int) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """A piece of a group's queue, by round: every sample comes once before any is visited twice."""
        ends = self._ends[number]
        for turn in range(bisect_right(ends, begin), bisect_left(ends, end) + 1 if begin < end else 0):
            start = ends[turn - 1] if turn else 0
            yield turn, self._round(epoch, number, turn)[max(0, begin - start) : end - start]

    def _make_round(self, epoch: int, number: int, turn: int) -> npt.NDArray[np.int64]:
        group = self.groups[number]
        among = np.array(group.visits, np.int64) > turn
        source = self.sources[group.source].id
        names = np.array(group.names, np.uint64)[among]
        order = ordered(names, self.seed, "order", source, group.name, epoch, turn)
        return np.array(group.samples, np.int64)[among][order]


def _round_ends(group: Group) -> Sequence[int]:
    """Where the rounds of a group's queue end. A million equal ones (`repeats`) must not take memory."""
    count, most = len(group.visits), max(group.visits, default=0)
    if count and most == min(group.visits):
        return range(count, count * most + 1, count)
    return [*accumulate(sum(visits > turn for visits in group.visits) for turn in range(most))]
