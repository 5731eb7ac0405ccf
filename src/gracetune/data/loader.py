"""The stateful loader: hands out micro-batches of references, one rank's share at a time.

Everything about the order is in `sampler`; this adds the rank's share, looking ahead, and the saved state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gracetune.data.errors import DataError
from gracetune.data.fingerprint import Fingerprint, differences
from gracetune.data.index import DataIndex, Unreadable
from gracetune.data.items import DatasetIndex
from gracetune.data.refs import BatchRef, SampleRef
from gracetune.data.sampler import Cursor, Drawn, Group, Order

STATE_VERSION = 2


@dataclass(frozen=True)
class EpochEnd:
    """Every sample of the epoch has been handed out; the next call begins the next epoch."""

    epoch: int
    """Counted from 0."""
    samples: int
    batches: int
    short_batches: int
    """Smaller than asked for, because nothing of their shape was left."""


@dataclass(frozen=True)
class Exhausted:
    """The run's last epoch is over; every further call says so again."""

    epochs: int
    samples: int


Outcome = BatchRef | EpochEnd | Exhausted
"""What a call of the loader can bring."""


class OtherDataError(DataError):
    """A saved state belongs to other data than the loader has."""


@dataclass(frozen=True)
class _Forecast:
    asked: tuple[int, tuple[bool, ...]]
    outcome: Outcome
    cursor: Cursor


class Loader:
    """One rank's view of the run's batches. All ranks call it equally often, with the same sizes and steps."""

    def __init__(
        self,
        index: DataIndex,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}")
        self._rank, self._world_size, self._epochs = rank, world_size, epochs
        self._whole = self._index = index
        """As the run began, and without what was excluded since."""
        self._excluded: dict[str, dict[str, str]] = {}
        self._order = index.order(batch_size)
        self._names = _names(self._order)
        self._cursor = self._order.start()
        self._forecasts: deque[_Forecast] = deque()

    @property
    def epoch(self) -> int:
        """Of the next batch, counted from 0."""
        return self._cursor.epoch

    @property
    def index(self) -> DataIndex:
        """What is handed out: the index the loader was made with, without what was excluded."""
        return self._index

    def next_batch(self, size: int | None = None, *, step: int = 0) -> Outcome:
        """This rank's part of the next micro-batch.

        `size` is the micro-batch of one rank (unset: the run's); `step` the number of optimizer steps done, which
        decides the datasets with a `start_step` or `end_step`.
        """
        asked = self._asked(size, step)
        if self._forecasts and self._forecasts[0].asked == asked:
            forecast = self._forecasts.popleft()
        else:
            self._forecasts.clear()
            made = self._forecast(self._cursor, asked, step)
            if made is None:
                raise self._nothing_active(step)
            forecast = made
        self._cursor = forecast.cursor
        return forecast.outcome

    def peek(
        self, count: int, size: int | None = None, *, step: int = 0, per_step: int | None = None, done: int = 0
    ) -> tuple[Outcome, ...]:
        """What the next `count` calls will bring if they are asked the same; fewer where no dataset is active any more.

        With `per_step` the calls are those of a run that takes that many batches in each step, `done` of them already
        in this one; otherwise all are of this step. Changes nothing, and what was foreseen is not computed again when
        its turn comes.
        """
        foreseen = list(self._forecasts)
        self._forecasts.clear()
        for number in range(max(count, len(foreseen))):
            at = step if per_step is None else step + done // per_step
            asked = self._asked(size, at)
            if number < len(foreseen) and foreseen[number].asked == asked:
                forecast: _Forecast | None = foreseen[number]
            elif len(self._forecasts) < count:
                foreseen = foreseen[:number]  # what came after it rests on it
                cursor = self._forecasts[-1].cursor if self._forecasts else self._cursor
                forecast = self._forecast(cursor, asked, at)
            else:
                break
            if forecast is None:
                break
            self._forecasts.append(forecast)
            done += isinstance(forecast.outcome, BatchRef)
        return tuple(forecast.outcome for forecast in list(self._forecasts)[:count])

    def exclude(self, unreadable: Unreadable) -> None:
        """Leave out files that turned out to be damaged when they were decoded, from now on.

        Everything else comes as it would have: what was visited in this epoch is not visited again, what was not is.
        What is excluded is part of the state. All ranks exclude the same before the same call. Raises
        UnreadableFilesError where that makes more than `corrupt_threshold` allows; then nothing has changed.
        """
        index = self._index.without(unreadable)
        order, taken = self._order.without(self._cursor, _gone(self._index.datasets, index.datasets))
        for dataset_id, files in unreadable.items():
            self._excluded.setdefault(dataset_id, {}).update(files)
        self._use(index, order, replace(self._cursor, taken=taken))

    def _use(self, index: DataIndex, order: Order, cursor: Cursor) -> None:
        self._index, self._order, self._cursor = index, order, cursor
        self._names = _names(order)
        self._forecasts.clear()

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON; the same on all ranks, and good for any number of them."""
        cursor = self._cursor
        return {
            "version": STATE_VERSION,
            "seed": self._index.seed,
            "epoch": cursor.epoch,
            "consumed": cursor.consumed,
            **({} if cursor.consumed - cursor.began == sum(cursor.taken) else {"began": cursor.began}),
            "batches": cursor.batches,
            "short": cursor.short,
            "taken": {name: taken for name, taken in zip(self._names, cursor.taken, strict=True) if taken},
            "excluded": {name: dict(files) for name, files in self._excluded.items()},
            "data": self._whole.fingerprint.as_json(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, allow_other_data: bool = False) -> tuple[str, ...]:
        """Go on where the state was saved. Returns what differs from then where that was allowed; else raises.

        What was excluded then stays so, unless the data is other data: then it may have been mended.
        """
        if state.get("version") != STATE_VERSION:
            raise DataError(
                f"loader state of version {state.get('version')}; this release reads version {STATE_VERSION}. "
                "Resume with the release that saved it, or start the data anew with --resume none"
            )
        changed = differences(Fingerprint.from_json(state["data"]), self._whole.fingerprint)
        if state["seed"] != self._whole.seed:
            changed = (f"training.seed was {state['seed']} and is {self._whole.seed}", *changed)
        if changed and not allow_other_data:
            raise OtherDataError(
                "the checkpoint was made with other data:\n  "
                + "\n  ".join(changed)
                + "\nPut it back as it was, or train from the run folder's config.yaml, which has the old settings, "
                + "or resume with --allow-other-data: the epoch goes on with what is there"
            )
        excluded = {} if changed else {name: dict(files) for name, files in state["excluded"].items()}
        index, order = self._index, self._order
        if excluded != self._excluded:
            index = self._whole.without(excluded) if excluded else self._whole
            order = index.order(self._order.batch_size)
        taken = tuple(
            _known_taken(int(state["taken"].get(name, 0)), group, order)
            for name, group in zip(_names(order), order.groups, strict=True)
        )
        self._excluded = excluded
        began = state.get("began", state["consumed"] - sum(taken))
        cursor = Cursor(taken, state["epoch"], state["consumed"], state["batches"], state["short"], began)
        self._use(index, order, cursor)
        return changed

    def _size(self, size: int | None) -> int:
        wanted = self._order.batch_size if size is None else size
        if wanted < 1:
            raise ValueError(f"a micro-batch of {wanted} samples")
        return wanted

    def _asked(self, size: int | None, step: int) -> tuple[int, tuple[bool, ...]]:
        """What a forecast depends on beside the cursor. The epoch's part of the activity is in the cursor."""
        active = tuple(
            step >= source.start_step and (source.end_step is None or step < source.end_step)
            for source in self._order.sources
        )
        turn = self._order.alternates and self._order.mixing.is_even_turn(step)
        return self._size(size), (*active, turn)

    def _forecast(self, cursor: Cursor, asked: tuple[int, tuple[bool, ...]], step: int) -> _Forecast | None:
        """None where an epoch begins without any dataset."""
        if self._epochs is not None and cursor.epoch >= self._epochs:
            return _Forecast(asked, Exhausted(self._epochs, cursor.consumed), cursor)
        drawn = self._order.draw(cursor, asked[0], step, self._world_size)
        if drawn is not None:
            return _Forecast(asked, self._share(drawn[0], cursor.epoch), drawn[1])
        if not cursor.batches:
            return None
        end = EpochEnd(cursor.epoch, cursor.consumed - cursor.began, cursor.batches, cursor.short)
        return _Forecast(asked, end, self._order.next_epoch(cursor))

    def _nothing_active(self, step: int) -> DataError:
        return DataError(
            f"no dataset is active in epoch {self.epoch + 1} after step {step}:\n  "
            + "\n  ".join(source.period for source in self._order.sources)
            + "\nMove a start or an end so that there is always one"
        )

    def _share(self, drawn: Drawn, epoch: int) -> BatchRef:
        """This rank's contiguous part; parts differ by at most one sample."""
        count = len(drawn.visits)
        begin = count * self._rank // self._world_size
        end = count * (self._rank + 1) // self._world_size
        padding = begin == end
        mine = range(begin, begin + 1) if padding else range(begin, end)
        samples = tuple(self._index.ref(drawn, number, epoch) for number in mine)
        if padding:
            samples = tuple(without_weight(sample) for sample in samples)
        indexes = tuple(drawn.first_index + number for number in mine)
        return BatchRef(samples, drawn.shape[0], indexes, epoch, count, padding)


def _gone(before: Sequence[DatasetIndex], after: Sequence[DatasetIndex]) -> dict[int, list[int]]:
    """By the position of a dataset that lost some, the positions its lost samples had."""
    found = {}
    for position, (one, other) in enumerate(zip(before, after, strict=True)):
        if one is not other:
            kept = {item.path for item in other.items}
            found[position] = [number for number, item in enumerate(one.items) if item.path not in kept]
    return found


def _known_taken(taken: int, group: Group, order: Order) -> int:
    """Of a saved state. A dataset may have fewer samples than then; one with epochs of its own is never used up."""
    return taken if order.sources[group.source].even_steps else min(taken, group.total)


def _names(order: Order) -> list[str]:
    """Of the groups, as they are called in a saved state."""
    return [f"{order.sources[group.source].id}:{group.name}" for group in order.groups]


def without_weight(sample: SampleRef) -> SampleRef:
    return replace(sample, loss_weight=0.0)
