from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from gracetune.data.ahead import LoadedBatch, decode_ahead
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.loader import EpochEnd, Exhausted, Loader
from gracetune.data.refs import BatchRef, SampleRef
from unit.data.folders import index_of, made_up, pictures, write


def path_of(ref: SampleRef) -> str:
    return ref.path


class TestOrder:
    def test_batches_arrive_as_the_loader_has_them(self) -> None:
        index = made_up({"counts": [7, 5]})
        plain, source = Loader(index, batch_size=2, epochs=2), Loader(index, batch_size=2, epochs=2)

        def slow_for_some(ref: SampleRef) -> str:
            time.sleep(0.002 * (len(ref.path) + int(ref.path[-5]) % 3))
            return ref.path

        with decode_ahead(source, slow_for_some, workers=3, depth=4) as ahead:
            while True:
                expected, found = plain.next_batch(), ahead.next_batch()
                if isinstance(expected, EpochEnd | Exhausted):
                    assert found == expected
                    if isinstance(expected, Exhausted):
                        break
                else:
                    assert isinstance(found, LoadedBatch)
                    assert found.ref == expected
                    assert found.samples == tuple(sample.path for sample in expected.samples)

    def test_the_state_is_that_of_what_was_handed_out(self) -> None:
        index = made_up({"counts": [9]})
        plain, source = Loader(index, batch_size=2), Loader(index, batch_size=2)
        with decode_ahead(source, path_of, depth=3) as ahead:
            for _ in range(3):
                plain.next_batch()
                ahead.next_batch()
                assert source.state_dict() == plain.state_dict()

    def test_a_changed_batch_size_drops_what_was_started(self) -> None:
        index = made_up({"counts": [20]})
        plain, source = Loader(index, batch_size=2), Loader(index, batch_size=2)
        with decode_ahead(source, path_of, workers=2, depth=3) as ahead:
            for size in (1, 1, 3, 2, 4):
                expected, found = plain.next_batch(size), ahead.next_batch(size)
                assert isinstance(found, LoadedBatch)
                assert found.ref == expected


class TestWork:
    def test_the_next_batches_are_decoded_while_this_one_is_used(self) -> None:
        """Nothing is asked for, and still the next `depth` batches get done."""
        done = threading.Semaphore(0)

        def load(ref: SampleRef) -> str:
            done.release()
            return ref.path

        with decode_ahead(Loader(made_up({"counts": [20]}), batch_size=2), load, workers=2, depth=3) as ahead:
            ahead.next_batch()
            for _ in range(2 * (1 + 3)):
                assert done.acquire(timeout=10)
            assert not done.acquire(timeout=0.05)

    def test_samples_are_decoded_side_by_side(self) -> None:
        meeting = threading.Barrier(4, timeout=10)

        def load(ref: SampleRef) -> int:
            return meeting.wait()

        loader = Loader(made_up({"counts": [4]}), batch_size=2, epochs=1)
        with decode_ahead(loader, load, workers=4, depth=2) as ahead:
            assert isinstance(ahead.next_batch(), LoadedBatch)

    def test_each_sample_is_decoded_once(self) -> None:
        loaded: list[str] = []
        index = made_up({"counts": [9, 4]})

        def load(ref: SampleRef) -> str:
            loaded.append(ref.path)
            return ref.path

        with decode_ahead(Loader(index, batch_size=3, epochs=1), load, workers=2, depth=4) as ahead:
            while not isinstance(ahead.next_batch(), Exhausted):
                pass
        assert sorted(loaded) == sorted(item.path for item in index.datasets[0].items)

    def test_what_will_not_come_is_not_decoded_any_more(self) -> None:
        """One worker is held up in the second batch when the batch size changes; the third was only waiting."""
        loader = Loader(made_up({"counts": [20]}), batch_size=1)
        _, second, third = (batch.samples[0].path for batch in loader.peek(3) if isinstance(batch, BatchRef))
        reached, gate = threading.Event(), threading.Event()
        loaded: list[str] = []

        def load(ref: SampleRef) -> str:
            loaded.append(ref.path)
            if ref.path == second:
                reached.set()
                gate.wait(10)
            return ref.path

        with decode_ahead(loader, load, workers=1, depth=3) as ahead:
            ahead.next_batch(1)
            assert reached.wait(10)
            opener = threading.Timer(0.1, gate.set)
            opener.start()
            found = ahead.next_batch(2)
            opener.join()
        assert isinstance(found, LoadedBatch)
        assert found.samples == (second, third)
        assert loaded.count(third) == 1

    def test_a_bad_file_raises_when_its_turn_comes_and_names_itself(self) -> None:
        loader = Loader(made_up({"counts": [6]}), batch_size=1)
        bad = [batch.samples[0].path for batch in loader.peek(6) if isinstance(batch, BatchRef)][2]

        def load(ref: SampleRef) -> str:
            if ref.path == bad:
                raise UnreadableMediaError(ref.path, "damaged in the middle")
            return ref.path

        with decode_ahead(loader, load, workers=2, depth=4) as ahead:
            assert isinstance(ahead.next_batch(), LoadedBatch)
            assert isinstance(ahead.next_batch(), LoadedBatch)
            before = loader.state_dict()
            for _ in range(2):
                with pytest.raises(UnreadableMediaError, match=bad):
                    ahead.next_batch()
            assert loader.state_dict() == before

    def test_without_the_bad_file_the_rest_of_its_batch_comes(self) -> None:
        loader = Loader(made_up({"counts": [9], "corrupt_threshold": 0.5}), batch_size=3, epochs=1)
        wanted = [sample.path for batch in loader.peek(3) if isinstance(batch, BatchRef) for sample in batch.samples]
        bad = wanted.pop(4)

        def load(ref: SampleRef) -> str:
            if ref.path == bad:
                raise UnreadableMediaError(ref.path, "damaged in the middle", ref.dataset)
            return ref.path

        seen: list[str] = []
        with decode_ahead(loader, load, workers=2, depth=2) as ahead:
            while True:
                try:
                    batch = ahead.next_batch()
                except UnreadableMediaError as error:
                    assert error.dataset is not None
                    loader.exclude(error.dataset, {error.path: error.reason})
                    continue
                if not isinstance(batch, LoadedBatch):
                    break
                seen += batch.samples
        assert seen == wanted

    def test_leaving_early_ends_the_threads(self) -> None:
        before = threading.active_count()
        with decode_ahead(Loader(made_up({"counts": [50]}), batch_size=8), path_of, workers=4, depth=4) as ahead:
            ahead.next_batch()
        assert threading.active_count() == before

    @pytest.mark.parametrize(("workers", "depth"), [(0, 1), (1, 0)])
    def test_nonsense_is_refused(self, workers: int, depth: int) -> None:
        with (
            pytest.raises(ValueError, match="workers"),
            decode_ahead(Loader(made_up({"counts": [1]}), batch_size=1), path_of, workers=workers, depth=depth),
        ):
            pass


def test_real_pictures(tmp_path: Path) -> None:
    index = index_of(tmp_path, {"path": str(write(tmp_path / "data", pictures(9)))})
    with decode_ahead(Loader(index, batch_size=2, epochs=1), index.load, workers=2) as ahead:
        seen = 0
        while isinstance(batch := ahead.next_batch(), LoadedBatch):
            for ref, sample in zip(batch.ref.samples, batch.samples, strict=True):
                assert sample.pixels is not None
                assert tuple(sample.pixels.shape) == (3, ref.bucket.height, ref.bucket.width)
                seen += 1
    assert seen == 9
