"""In which order a run visits its samples. Pure: the same (seed, epoch, position) gives the same batch on every rank.

An epoch visits every sample of every dataset that is active in it, 1 + `repeats` times. A batch is drawn in two steps:
a dataset, in proportion to its `probability` and its visits, then one of its groups (samples of one shape), in
proportion to what is left of it. Inside a group the order is shuffled anew for every epoch and round; a sample that is
taken out changes nothing about the order of the others. Batches are drawn for all ranks together, so the order does not
know how many there are; what is left of a group makes a smaller batch, or is filled up with samples of the group.

Datasets with `even_steps` give every second optimizer step and have epochs of their own: they begin anew whenever they
are used up. Datasets with a `turn` are taken in turn, batch by batch.
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
    even_steps: bool = False
    """Its batches make every second optimizer step."""
    turn: int | None = None
    """Place in the row of datasets that are taken in turn; None is the last."""

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
class Mixing:
    """How batches are made up, for a whole run."""

    fill: bool = False
    """Batches for which too little is left are filled up."""
    equal: bool = False
    """A dataset's share follows its `probability` alone, not its size too."""
    other_steps: tuple[int, ...] = ()
    """Steps that are multiples of one of these are no turn of the datasets with `even_steps`."""

    def is_even_turn(self, step: int) -> bool:
        return step % 2 == 0 and all(step % every for every in self.other_steps)


MIXED_BY_SIZE = Mixing()


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
    """Visits handed out in this epoch, of each group; since the run began, of those with `even_steps`."""
    epoch: int = 0
    consumed: int = 0
    """Samples handed out since the run began: the next global sample index."""
    batches: int = 0
    """Of this epoch."""
    short: int = 0
    """Batches of this epoch that were smaller than asked for."""
    began: int = 0
    """`consumed` when the epoch began."""


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
    passed: int | None = None
    """How often its dataset was used up before, where it has epochs of its own."""


class Order:
    """The order of one run's samples."""

    def __init__(
        self,
        sources: Sequence[Source],
        groups: Iterable[Group],
        *,
        seed: int,
        batch_size: int,
        mixing: Mixing = MIXED_BY_SIZE,
    ) -> None:
        self.sources = tuple(sources)
        self.groups = tuple(groups)
        self.seed, self.batch_size, self.mixing = seed, batch_size, mixing
        self.alternates = any(source.even_steps for source in self.sources)
        """Whether it depends on the step which datasets come."""
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
        within = tuple(source.active(epoch, step) for source in self.sources)
        others = [active for active, source in zip(within, self.sources, strict=True) if not source.even_steps]
        if not self.alternates or not any(others):
            return within
        turn = self.mixing.is_even_turn(step)
        return tuple(
            active and source.even_steps == turn for active, source in zip(within, self.sources, strict=True)
        )  # fmt: skip

    def draw(self, cursor: Cursor, size: int, step: int, world_size: int) -> tuple[Drawn, Cursor] | None:
        """The next batch and the cursor behind it; None where nothing of the epoch is left."""
        begun, passed = self._begun(cursor)
        left = [total - taken for total, taken in zip(self._totals, begun, strict=True)]
        open_sources = [
            position
            for position, active in enumerate(self.active(cursor.epoch, step))
            if active and any(left[number] for number in self._members[position])
        ]
        if not open_sources:
            return None
        place = sum(cursor.taken)
        position = self._draw_source(self._in_turn(open_sources, cursor.batches), cursor.epoch, place)
        number = self._draw_group(position, left, cursor.epoch, place)
        wanted = self.size(position, size) * world_size
        count, begin, own = min(wanted, left[number]), begun[number], passed[position]
        visits = self._visits(cursor.epoch if own is None else own, number, begin, begin + count)
        if self.mixing.fill:
            visits += self._fillers(cursor.epoch if own is None else own, number, wanted - count)
        taken = (*cursor.taken[:number], cursor.taken[number] + count, *cursor.taken[number + 1 :])
        behind = replace(
            cursor, taken=taken, consumed=cursor.consumed + len(visits), batches=cursor.batches + 1,
            short=cursor.short + (len(visits) < wanted),
        )  # fmt: skip
        return Drawn(position, self.groups[number].shape, visits, cursor.consumed, own), behind

    def _begun(self, cursor: Cursor) -> tuple[Sequence[int], Sequence[int | None]]:
        """Visits handed out of each group in the epoch it is in; how often each dataset with epochs of its own, and no
        other, was used up."""
        if not self.alternates:
            return cursor.taken, (None,) * len(self.sources)
        passed = [self._passed(cursor, position) for position in range(len(self.sources))]
        begun = [
            taken - (passed[group.source] or 0) * total
            for taken, total, group in zip(cursor.taken, self._totals, self.groups, strict=True)
        ]
        return begun, passed

    def _passed(self, cursor: Cursor, position: int) -> int | None:
        if not self.sources[position].even_steps:
            return None
        counts = [(cursor.taken[number], self._totals[number]) for number in self._members[position]]
        return min((taken // total for taken, total in counts if total), default=0)

    def _visits(self, epoch: int, number: int, begin: int, end: int) -> tuple[Visit, ...]:
        return tuple(
            Visit(int(sample), turn)
            for turn, samples in self._rounds(epoch, number, begin, end)
            for sample in samples
        )  # fmt: skip

    def _fillers(self, epoch: int, number: int, count: int) -> tuple[Visit, ...]:
        """The first samples of a group's epoch once more, and again where there are too few."""
        if count < 1:
            return ()
        first = self._visits(epoch, number, 0, min(count, self._totals[number]))
        return tuple(islice(cycle(first), count))

    def _in_turn(self, candidates: list[int], batches: int) -> list[int]:
        """Of the datasets with something left, those whose turn it is."""
        if not self._takes_turns:
            return candidates
        turns = {position: self.sources[position].turn for position in candidates}
        row = sorted({*turns.values()}, key=lambda turn: (turn is None, turn or 0))
        return [position for position, turn in turns.items() if turn == row[batches % len(row)]]

    def next_epoch(self, cursor: Cursor) -> Cursor:
        """Datasets with epochs of their own go on where they are."""
        taken = tuple(
            taken if self.sources[group.source].even_steps else 0
            for taken, group in zip(cursor.taken, self.groups, strict=True)
        )
        return Cursor(taken, epoch=cursor.epoch + 1, consumed=cursor.consumed, began=cursor.consumed)

    def handed_out(self, cursor: Cursor, number: int) -> npt.NDArray[np.int64]:
        """The samples of a group that were visited in the epoch it is in, one for every visit."""
        begun, passed = self._begun(cursor)
        own = passed[self.groups[number].source]
        rounds = self._rounds(cursor.epoch if own is None else own, number, 0, begun[number])
        return np.concatenate([np.empty(0, np.int64), *(samples for _, samples in rounds)])

    def without(self, cursor: Cursor, gone: Mapping[int, Sequence[int]]) -> tuple[Order, tuple[int, ...]]:
        """The order of what is left, and `Cursor.taken` of it.

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
            left = samples[kept]
            chosen = kept.tolist()
            remaining = replace(
                group,
                samples=tuple((left - np.searchsorted(lost, left)).tolist()),
                visits=tuple(compress(group.visits, chosen)),
                names=tuple(compress(group.names, chosen)),
            )
            groups.append(remaining)
            visited = self.handed_out(cursor, number)
            passed = self._passed(cursor, group.source) or 0
            taken.append(passed * remaining.total + len(visited) - int(np.isin(visited, lost).sum()))
        order = Order(self.sources, groups, seed=self.seed, batch_size=self.batch_size, mixing=self.mixing)
        return order, tuple(taken)

    def whole_epoch(self, epoch: int, size: int, step: int, world_size: int) -> Cursor:
        """The cursor behind an epoch of equal batches: its `batches` and `short` are what a plan wants to know."""
        if self.alternates:
            return self._walked_epoch(epoch, size, step, world_size)
        active = self.active(epoch, step)
        # Whatever order they come in, a group gives full batches and what is left of it.
        taken = tuple(group.total if active[group.source] else 0 for group in self.groups)
        whole = [self.size(group.source, size) * world_size for group in self.groups]
        return Cursor(
            taken,
            epoch,
            consumed=sum(taken),
            batches=sum(-(-visits // wanted) for visits, wanted in zip(taken, whole, strict=True)),
            short=0
            if self.mixing.fill
            else sum(visits % wanted > 0 for visits, wanted in zip(taken, whole, strict=True)),
        )

    def _walked_epoch(self, epoch: int, size: int, step: int, world_size: int) -> Cursor:
        """The same where it depends on the step which datasets come: with one batch a step."""
        cursor = replace(self.start(), epoch=epoch)
        while (drawn := self.draw(cursor, size, step + cursor.batches, world_size)) is not None:
            cursor = drawn[1]
        return cursor

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
