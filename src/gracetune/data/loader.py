"""The stateful loader: returns one rank's part of each micro-batch, as references to samples.

`sampler` decides the order of samples. The loader adds the division among ranks, look-ahead, and the saved state.
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
from gracetune.data.sampler import Cursor, GlobalBatch, Order, SampleGroup

STATE_VERSION = 2


@dataclass(frozen=True)
class EpochEnd:
    """All samples of the epoch have been returned. The next call starts the next epoch."""

    epoch: int
    """Counted from 0."""
    samples: int
    """Samples of the epoch, over all ranks."""
    batches: int
    """Micro-batches of the epoch. One counts once, although each rank returns a part of it."""
    short_batches: int
    """Batches smaller than requested, because no samples of their shape were left."""


@dataclass(frozen=True)
class Exhausted:
    """The run's last epoch is over. Every further call returns this again."""

    epochs: int
    samples: int
    """Samples of the whole run, over all ranks."""


Outcome = BatchRef | EpochEnd | Exhausted
"""What `Loader.next_batch` can return."""


class OtherDataError(DataError):
    """A saved state belongs to data other than the loader's."""


@dataclass(frozen=True)
class _Forecast:
    """A batch computed ahead of time."""

    request: tuple[int, tuple[bool, ...]]
    """The arguments it depends on; see `Loader._request`."""
    outcome: Outcome
    cursor: Cursor
    """The position after this batch."""


class Loader:
    """One rank's part of the run's batches. All ranks must make the same calls, with the same sizes and steps."""

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
        """The index at the start of the run, and the current one without excluded files."""
        self._excluded: dict[str, dict[str, str]] = {}
        self._order = index.order(batch_size)
        self._names = _names(self._order)
        self._cursor = self._order.start()
        self._forecasts: deque[_Forecast] = deque()

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, counted from 0."""
        return self._cursor.epoch

    @property
    def index(self) -> DataIndex:
        """The current index, without excluded files."""
        return self._index

    def next_batch(self, size: int | None = None, *, step: int = 0) -> Outcome:
        """This rank's part of the next micro-batch.

        `size` is the micro-batch of one rank, by default the run's. `step` is the number of completed optimizer steps,
        which decides whether datasets with a `start_step` or `end_step` are active.
        """
        request = self._request(size, step)
        if self._forecasts and self._forecasts[0].request == request:
            forecast = self._forecasts.popleft()
        else:
            self._forecasts.clear()
            computed = self._forecast(self._cursor, request, step)
            if computed is None:
                raise self._nothing_active(step)
            forecast = computed
        self._cursor = forecast.cursor
        return forecast.outcome

    def peek(
        self, count: int, size: int | None = None, *, step: int = 0, per_step: int | None = None, done: int = 0
    ) -> tuple[Outcome, ...]:
        """The results of the next `count` calls with these arguments; fewer if no dataset is active any more.

        With `per_step`, the calls are those of a run with that many batches per step, `done` of which have already been
        taken in the current one. Without it, all calls belong to this step. The loader's position does not change, and
        `next_batch` reuses the computed results.
        """
        previous = list(self._forecasts)
        self._forecasts.clear()
        for number in range(max(count, len(previous))):
            at_step = step if per_step is None else step + done // per_step
            request = self._request(size, at_step)
            if number < len(previous) and previous[number].request == request:
                forecast: _Forecast | None = previous[number]
            elif len(self._forecasts) < count:
                previous = previous[:number]  # later forecasts continued from this one, so they are invalid now
                cursor = self._forecasts[-1].cursor if self._forecasts else self._cursor
                forecast = self._forecast(cursor, request, at_step)
            else:
                break
            if forecast is None:
                break
            self._forecasts.append(forecast)
            done += isinstance(forecast.outcome, BatchRef)
        return tuple(forecast.outcome for forecast in list(self._forecasts)[:count])

    def exclude(self, unreadable: Unreadable) -> None:
        """Leave out files that were found to be damaged during decoding, from now on.

        The order of the other samples does not change, and none is visited twice or skipped in this epoch. Excluded
        files are part of the saved state. All ranks must exclude the same files before the same call. Raises
        UnreadableFilesError if they exceed `corrupt_threshold`; the loader is then unchanged.
        """
        index = self._index.without(unreadable)
        order, taken = self._order.without(self._cursor, _removed(self._index.datasets, index.datasets))
        for dataset_id, files in unreadable.items():
            self._excluded.setdefault(dataset_id, {}).update(files)
        self._use(index, order, replace(self._cursor, taken=taken))

    def _use(self, index: DataIndex, order: Order, cursor: Cursor) -> None:
        self._index, self._order, self._cursor = index, order, cursor
        self._names = _names(order)
        self._forecasts.clear()

    def state_dict(self) -> dict[str, Any]:
        """The position as plain JSON. It is the same on all ranks, and can be loaded with any number of ranks."""
        cursor = self._cursor
        return {
            "version": STATE_VERSION,
            "seed": self._index.seed,
            "epoch": cursor.epoch,
            "consumed": cursor.consumed,
            # Saved only if it cannot be derived from the other values, as `load_state_dict` does.
            **({} if cursor.consumed - cursor.began == sum(cursor.taken) else {"began": cursor.began}),
            "batches": cursor.batches,
            "short": cursor.short,
            "taken": {name: taken for name, taken in zip(self._names, cursor.taken, strict=True) if taken},
            "excluded": {name: dict(files) for name, files in self._excluded.items()},
            "data": self._whole.fingerprint.as_json(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, allow_other_data: bool = False) -> tuple[str, ...]:
        """Continue where the state was saved.

        If the data has changed, raises OtherDataError, or with `allow_other_data` returns the differences. Excluded
        files stay excluded, unless the data has changed: then the files may have been repaired.
        """
        if state.get("version") != STATE_VERSION:
            raise DataError(
                f"loader state of version {state.get('version')}; this release reads version {STATE_VERSION}. "
                "Resume with the release that saved it, or start over with --resume none"
            )
        changed = differences(Fingerprint.from_json(state["data"]), self._whole.fingerprint)
        if state["seed"] != self._whole.seed:
            changed = (f"training.seed was {state['seed']} and is {self._whole.seed}", *changed)
        if changed and not allow_other_data:
            raise OtherDataError(
                "the checkpoint was saved with other data:\n  "
                + "\n  ".join(changed)
                + "\nRestore the data, or train from the run folder's config.yaml, which has the old settings, "
                + "or resume with --allow-other-data to continue the epoch with the present data"
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
        cursor = Cursor(
            taken, epoch=state["epoch"], consumed=state["consumed"], batches=state["batches"], short=state["short"],
            began=began,
        )  # fmt: skip
        self._use(index, order, cursor)
        return changed

    def _size(self, size: int | None) -> int:
        wanted = self._order.batch_size if size is None else size
        if wanted < 1:
            raise ValueError(f"a micro-batch of {wanted} samples, expected at least 1")
        return wanted

    def _request(self, size: int | None, step: int) -> tuple[int, tuple[bool, ...]]:
        """All that a forecast depends on besides the cursor: the size, and what the step says about each dataset.

        Whether a dataset is active also depends on the epoch, but that is part of the cursor.
        """
        active = tuple(
            step >= source.start_step and (source.end_step is None or step < source.end_step)
            for source in self._order.sources
        )
        turn = self._order.alternates and self._order.mixing.is_even_turn(step)
        return self._size(size), (*active, turn)

    def _forecast(self, cursor: Cursor, request: tuple[int, tuple[bool, ...]], step: int) -> _Forecast | None:
        """Compute the result of a call at `cursor`. None if no dataset is active at the start of an epoch."""
        if self._epochs is not None and cursor.epoch >= self._epochs:
            return _Forecast(request, Exhausted(self._epochs, cursor.consumed), cursor)
        following = self._order.next_batch(cursor, request[0], step, self._world_size)
        if following is not None:
            batch, after = following
            return _Forecast(request, self._share(batch, cursor.epoch), after)
        if not cursor.batches:
            return None
        end = EpochEnd(cursor.epoch, cursor.consumed - cursor.began, cursor.batches, cursor.short)
        return _Forecast(request, end, self._order.next_epoch(cursor))

    def _nothing_active(self, step: int) -> DataError:
        return DataError(
            f"no dataset is active in epoch {self.epoch + 1} after step {step}:\n  "
            + "\n  ".join(source.period for source in self._order.sources)
            + "\nChange a start or an end so that at least one dataset is always active"
        )

    def _share(self, batch: GlobalBatch, epoch: int) -> BatchRef:
        """This rank's contiguous part of the batch. The parts of the ranks differ by at most one sample.

        If there are fewer samples than ranks, some parts are empty. Such a rank gets a sample of another rank with loss
        weight 0, because all ranks must take part in every step.
        """
        count = len(batch.visits)
        begin = count * self._rank // self._world_size
        end = count * (self._rank + 1) // self._world_size
        padding = begin == end
        mine = range(begin, begin + 1) if padding else range(begin, end)
        samples = tuple(self._index.ref(batch, number, epoch) for number in mine)
        if padding:
            samples = tuple(without_weight(sample) for sample in samples)
        indexes = tuple(batch.first_index + number for number in mine)
        return BatchRef(samples, batch.shape[0], indexes, epoch, global_samples=count, padding=padding)


def _removed(before: Sequence[DatasetIndex], after: Sequence[DatasetIndex]) -> dict[int, list[int]]:
    """The positions of removed items, by the position of their dataset."""
    found = {}
    for position, (old, new) in enumerate(zip(before, after, strict=True)):
        if old is not new:
            kept = {item.path for item in new.items}
            found[position] = [number for number, item in enumerate(old.items) if item.path not in kept]
    return found


def _known_taken(taken: int, group: SampleGroup, order: Order) -> int:
    """A group's saved count, limited to its present size: the data may have fewer samples now.

    The count of a dataset with its own epochs goes on across them and has no limit.
    """
    return taken if order.sources[group.source].even_steps else min(taken, group.total)


def _names(order: Order) -> list[str]:
    """The names of the groups in a saved state."""
    return [f"{order.sources[group.source].id}:{group.name}" for group in order.groups]


def without_weight(sample: SampleRef) -> SampleRef:
    return replace(sample, loss_weight=0.0)
