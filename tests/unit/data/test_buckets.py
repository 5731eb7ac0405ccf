from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from gracetune.config.dataset_config import Audio, Dataset, Video
from gracetune.data import bucket_rules, buckets
from gracetune.data.bucket_rules import Size
from gracetune.data.buckets import UnfitFile
from gracetune.data.geometry import Geometry
from gracetune.data.refs import Bucket, Fit
from gracetune.models.registry import GEOMETRIES

MULTIPLES = sorted({geometry.side_multiple for family in GEOMETRIES.values() for geometry in family.values()})
WAN = GEOMETRIES["wan"]["t2v-14b-2.2"]
AUDIO = GEOMETRIES["stable_audio"]["open-1.0"]

sizes = st.tuples(st.integers(1, 12_000), st.integers(1, 12_000))
multiples = st.sampled_from(MULTIPLES)
rules = st.sampled_from([*bucket_rules.RULES])
resolutions = st.one_of(
    st.tuples(st.sampled_from(["pixel", "pixel_area"]), st.integers(64, 2048).map(float)),
    st.tuples(st.just("area"), st.floats(0.01, 4.0)),
)
crops = st.one_of(
    st.just({}),
    st.builds(
        dict,
        enabled=st.just(True),
        style=st.sampled_from(["random", "center", "corner"]),
        aspect=st.sampled_from(["square", "preserve", "closest", "random"]),
        aspect_buckets=st.lists(st.floats(0.2, 5.0), min_size=1, max_size=4).map(tuple),
    ),
)


def dataset(**values: Any) -> Dataset:
    return Dataset.model_validate({"id": "d", "path": "p", **values})


def place(size: Size, of: Dataset, multiple: int, variant: int = 0, digest: str = "abc") -> tuple[Bucket, Fit]:
    geometry = Geometry("image", side_multiple=multiple, least_multiple=min(multiple, 16))
    aspect = buckets.trained_aspect(size, of, seed=1, digest=digest)
    wanted = bucket_rules.BucketRequest.of(size, aspect, of, geometry)  # strips too, which a dataset leaves out
    bucket = Bucket(*bucket_rules.RULES[of.buckets.rule].bucket(wanted))
    return bucket, buckets.fit_image(size, bucket, of, geometry, seed=1, digest=digest, variant=variant)


class TestSizes:
    @settings(deadline=None)
    @given(sizes, resolutions, multiples)
    def test_sides_are_multiples_the_model_supports(
        self, size: Size, requested: tuple[str, float], multiple: int
    ) -> None:
        of = dataset(resolution_type=requested[0], resolution=requested[1])
        width, height = bucket_rules.nearest_size(buckets.rounded_aspect(size, 2), of, multiple)
        assert width % multiple == height % multiple == 0
        assert min(width, height) >= multiple

    @settings(deadline=None)
    @given(st.floats(0.01, 100.0), resolutions, multiples)
    def test_each_side_is_within_half_a_multiple_of_the_exact_shape(
        self, aspect: float, requested: tuple[str, float], multiple: int
    ) -> None:
        kind, resolution = requested
        of = dataset(resolution_type=kind, resolution=resolution)
        width, height = bucket_rules.nearest_size(aspect, of, multiple)
        if kind == "pixel":
            exact = resolution * max(1.0, aspect), resolution / min(1.0, aspect)
        else:
            edge = resolution if kind == "pixel_area" else bucket_rules.megapixel_edge(resolution)
            exact = edge * math.sqrt(aspect), edge / math.sqrt(aspect)
        for side, wanted in zip((width, height), exact, strict=True):
            assert abs(side - wanted) <= multiple / 2 + 1e-6 or side == multiple

    @settings(deadline=None)
    @given(st.floats(0.25, 4.0), st.integers(512, 2048), multiples)
    def test_area_is_within_tolerance_of_the_target(self, aspect: float, resolution: int, multiple: int) -> None:
        """Half a multiple on either side of both edges: exactly what rounding can change."""
        width, height = bucket_rules.nearest_size(aspect, dataset(resolution=float(resolution)), multiple)
        step = multiple / 2 / resolution
        limit = step * (math.sqrt(aspect) + 1 / math.sqrt(aspect)) + step * step
        assert abs(width * height / resolution**2 - 1) <= limit + 1e-9

    @settings(deadline=None)
    @given(st.floats(0.01, 100.0), st.floats(0.01, 100.0), resolutions, multiples)
    def test_a_wider_image_never_gets_a_narrower_bucket(
        self, one: float, other: float, requested: tuple[str, float], multiple: int
    ) -> None:
        of = dataset(resolution_type=requested[0], resolution=requested[1])
        narrow, wide = (bucket_rules.nearest_size(aspect, of, multiple) for aspect in sorted((one, other)))
        assert narrow[0] <= wide[0]
        assert narrow[1] >= wide[1]

    @settings(deadline=None)
    @given(sizes, resolutions, st.floats(1.0, 4.0), multiples)
    def test_a_higher_resolution_never_gives_a_smaller_bucket(
        self, size: Size, requested: tuple[str, float], factor: float, multiple: int
    ) -> None:
        kind, resolution = requested
        assume(kind != "area" or not {resolution, resolution * factor} & {0.25, 1.0, 4.0})
        aspect = buckets.rounded_aspect(size, 2)
        small, large = (dataset(resolution_type=kind, resolution=resolution * by) for by in (1.0, factor))
        low, high = (bucket_rules.nearest_size(aspect, of, multiple) for of in (small, large))
        assert low[0] <= high[0]
        assert low[1] <= high[1]

    @pytest.mark.parametrize(
        ("size", "kind", "resolution", "multiple", "bucket"),
        [
            ((1024, 1024), "pixel_area", 1024, 64, (1024, 1024)),
            ((3000, 2000), "pixel_area", 1024, 64, (1280, 832)),
            ((2000, 3000), "pixel_area", 1024, 64, (832, 1280)),
            ((1920, 1080), "pixel_area", 1024, 64, (1344, 768)),
            ((1920, 1080), "pixel", 720, 16, (1280, 720)),
            ((1080, 1920), "pixel", 720, 16, (720, 1280)),
            ((832, 480), "pixel", 480, 16, (832, 480)),
            ((1000, 1000), "area", 1.0, 16, (1024, 1024)),
            ((1000, 1000), "area", 0.25, 16, (512, 512)),
            ((1000, 1000), "area", 0.5, 16, (704, 704)),
        ],
    )
    def test_by_example(self, size: Size, kind: str, resolution: float, multiple: int, bucket: Size) -> None:
        of = dataset(resolution_type=kind, resolution=float(resolution))
        assert bucket_rules.nearest_size(buckets.rounded_aspect(size, 2), of, multiple) == bucket

    def test_aspect_ratios_meet_at_two_decimals(self) -> None:
        assert buckets.rounded_aspect((1504, 1000), 2) == buckets.rounded_aspect((1500, 1000), 2) == 1.5
        assert buckets.rounded_aspect((1504, 1000), 3) != buckets.rounded_aspect((1500, 1000), 3)
        assert buckets.rounded_aspect((1, 1000), 2) == 0.01


class TestFit:
    @settings(deadline=None)
    @given(sizes, resolutions, crops, multiples, st.integers(0, 5), rules)
    @example((1, 12_000), ("pixel_area", 64.0), {}, 16, 0, "nearest")
    def test_every_image_covers_its_bucket_and_the_crop_is_inside(
        self, size: Size, requested: tuple[str, float], crop: dict[str, Any], multiple: int, variant: int, rule: str
    ) -> None:
        of = dataset(resolution_type=requested[0], resolution=requested[1], crop=crop, buckets={"rule": rule})
        bucket, fit = place(size, of, multiple, variant)
        assert fit.original == size
        assert bucket.width % min(multiple, 16) == bucket.height % min(multiple, 16) == 0
        assert 0 <= fit.left <= fit.resized[0] - bucket.width
        assert 0 <= fit.top <= fit.resized[1] - bucket.height

    @settings(deadline=None)
    @given(sizes, resolutions, crops, multiples)
    def test_it_is_never_scaled_further_than_it_takes_to_cover(
        self, size: Size, requested: tuple[str, float], crop: dict[str, Any], multiple: int
    ) -> None:
        bucket, fit = place(size, dataset(resolution_type=requested[0], resolution=requested[1], crop=crop), multiple)
        assert fit.resized[0] == bucket.width or fit.resized[1] == bucket.height

    @settings(deadline=None)
    @given(sizes, sizes)
    def test_scaling_keeps_the_shape_to_the_pixel(self, original: Size, target: Size) -> None:
        scaled = bucket_rules.cover(original, target)
        scale = max(target[0] / original[0], target[1] / original[1])
        assert scaled[0] >= target[0]
        assert scaled[1] >= target[1]
        assert all(abs(s - o * scale) <= 0.5 + 1e-6 * s for s, o in zip(scaled, original, strict=True))

    @settings(deadline=None)
    @given(st.floats(0.2, 5.0), resolutions, multiples)
    def test_without_crop_little_more_than_the_rounding_is_cut(
        self, aspect: float, requested: tuple[str, float], multiple: int
    ) -> None:
        """The loss comes from rounding the aspect ratio to two decimals and the sides to a multiple."""
        size = (round(1000 * aspect), 1000)
        bucket, fit = place(size, dataset(resolution_type=requested[0], resolution=requested[1]), multiple)
        kept = bucket.width * bucket.height / (fit.resized[0] * fit.resized[1])
        shape = bucket.width / bucket.height
        own = size[0] / size[1]
        assert kept == pytest.approx(min(shape / own, own / shape), abs=1.5 / min(bucket.width, bucket.height))
        assert fit.left == (fit.resized[0] - bucket.width) // 2

    @settings(deadline=None)
    @given(sizes, crops, st.integers(0, 5))
    def test_it_is_deterministic(self, size: Size, crop: dict[str, Any], variant: int) -> None:
        of = dataset(crop=crop)
        assert place(size, of, 16, variant) == place(size, of, 16, variant)

    def test_a_random_crop_moves_with_the_variant_and_the_file_and_nothing_else_does(self) -> None:
        for style, moves in (("random", True), ("center", False), ("corner", False)):
            of = dataset(crop={"enabled": True, "style": style})
            fits = {place((4000, 1000), of, 16, variant)[1].left for variant in range(8)}
            assert (len(fits) > 4) == moves
            fits = {place((4000, 1000), of, 16, digest=str(digest))[1].left for digest in range(8)}
            assert (len(fits) > 4) == moves

    def test_random_crops_reach_both_edges(self) -> None:
        of = dataset(resolution=64.0, crop={"enabled": True, "style": "random"})
        lefts = [place((100, 64), of, 16, variant)[1].left for variant in range(2_000)]
        assert set(lefts) == set(range(37))

    def test_the_variant_never_changes_the_bucket(self) -> None:
        of = dataset(crop={"enabled": True, "aspect": "random", "aspect_buckets": (0.5, 1.0, 2.0)})
        assert len({place((1000, 1000), of, 16, variant)[0] for variant in range(20)}) == 1
        assert len({place((1000, 1000), of, 16, digest=str(digest))[0] for digest in range(60)}) == 3

    def test_styles(self) -> None:
        of = dataset(crop={"enabled": True, "style": "center"})
        assert place((2048, 1024), of, 16) == (Bucket(1024, 1024), Fit((2048, 1024), (2048, 1024), 512, 0))
        of = dataset(crop={"enabled": True, "style": "corner"})
        assert place((1024, 2048), of, 16) == (Bucket(1024, 1024), Fit((1024, 2048), (1024, 2048), 0, 0))

    def test_closest_cuts_least_away(self) -> None:
        of = dataset(crop={"enabled": True, "aspect": "closest", "aspect_buckets": (0.5, 1.0, 2.0)})
        assert place((1450, 1000), of, 16)[0].width > place((1450, 1000), of, 16)[0].height
        assert place((1400, 1000), of, 16)[0] == Bucket(1024, 1024)
        assert place((700, 1000), of, 16)[0].width < 1024

    @pytest.mark.parametrize(
        ("size", "kind", "limits", "scaled"),
        [
            ((4000, 4000), "pixel_area", (1536, 1280), (1280, 1280)),
            ((4000, 3000), "pixel", (1536, 1280), (1707, 1280)),
            ((4000, 4000), "area", (2.25, 1.44), (1200, 1200)),
            ((1400, 1400), "pixel_area", (1536, 1280), (1400, 1400)),  # below the limit it keeps its own size
            ((600, 600), "pixel_area", (1536, 1280), (1024, 1024)),  # and is enlarged where it has to be
            ((8000, 1300), "pixel_area", (1536, 1100), (6302, 1024)),  # never below what covers the bucket
        ],
    )
    def test_large_images_are_scaled_before_the_crop(
        self, size: Size, kind: str, limits: tuple[float, float], scaled: Size
    ) -> None:
        resolution = 1.0 if kind == "area" else 1024.0
        of = dataset(resolution=resolution, resolution_type=kind, maximum_size=float(limits[0]),
                     downsample_to=float(limits[1]), crop={"enabled": True, "style": "center"})  # fmt: skip
        assert place(size, of, 16)[1].resized == scaled

    def test_without_crop_the_limit_changes_nothing(self) -> None:
        of = dataset(maximum_size=1536.0, downsample_to=1280.0)
        assert place((4000, 4000), of, 16)[1].resized == (1024, 1024)

    def test_downsample_to_alone_is_for_every_image(self) -> None:
        of = dataset(downsample_to=1280.0, crop={"enabled": True, "style": "center"})
        assert [place((side, side), of, 16)[1].resized[0] for side in (600, 1400, 4000)] == [1280] * 3

    @settings(deadline=None)
    @given(sizes, st.integers(256, 2048), multiples)
    def test_at_most_enlarges_by_no_more_than_a_step(self, size: Size, resolution: int, multiple: int) -> None:
        of = dataset(resolution=float(resolution), buckets={"rule": "at_most"})
        assume(min(size) >= multiple and max(size) / min(size) < 16)
        bucket, fit = place(size, of, multiple)
        assert bucket.width * bucket.height <= max(resolution**2, multiple**2)
        assert fit.resized[0] <= size[0] + 2 * multiple * max(1.0, size[0] / size[1])


class TestFilters:
    def test_a_side_may_not_be_shorter_than_minimum_edge(self) -> None:
        of = dataset(minimum_edge=500.0)
        assert buckets.unfit_image((500, 3000), of) is None
        assert buckets.unfit_image((499, 3000), of) == UnfitFile("a side below minimum_edge 500", "499x3000")

    @pytest.mark.parametrize(
        ("kind", "limit", "passes", "fails"),
        [
            ("pixel", 1024, (1760, 1024), (1280, 768)),
            ("pixel_area", 1024, (1280, 960), (1023, 1024)),
            ("area", 1.0, (1000, 1000), (999, 1000)),
        ],
    )
    def test_minimum_size_in_the_dataset_s_own_unit(self, kind: str, limit: float, passes: Size, fails: Size) -> None:
        of = dataset(resolution_type=kind, minimum_size=float(limit))
        assert buckets.unfit_image(passes, of) is None
        found = buckets.unfit_image(fails, of)
        assert found is not None
        assert "minimum_size" in found.reason
        assert f"{fails[0]}x{fails[1]}" in found.detail

    def test_aspect_ratios(self) -> None:
        of = dataset(minimum_aspect_ratio=0.5, maximum_aspect_ratio=2.0)
        assert buckets.unfit_image((1000, 2000), of) is None
        assert buckets.unfit_image((2000, 1000), of) is None
        narrow, wide = buckets.unfit_image((999, 2000), of), buckets.unfit_image((2001, 1000), of)
        assert narrow is not None
        assert "narrower" in narrow.reason
        assert wide is not None
        assert "wider" in wide.reason

    def test_extreme_aspect_ratios_are_left_out_unless_cropped(self) -> None:
        assert buckets.unfit_image((1600, 100), dataset()) is None
        for size in ((1601, 100), (100, 1601)):
            found = buckets.unfit_image(size, dataset())
            assert found is not None
            assert "16:1" in found.reason
            assert buckets.unfit_image(size, dataset(crop={"enabled": True})) is None


class TestFrames:
    @settings(deadline=None)
    @given(st.integers(1, 2000), st.sampled_from([1, 4, 8]))
    def test_fitting_frames_is_the_longest_supported_length(self, frames: int, step: int) -> None:
        fitting = buckets.fitting_frames(frames, step)
        assert fitting % step == 1 % step
        assert fitting <= frames < fitting + step

    def test_the_family_s_length_is_taken_where_none_is_given(self) -> None:
        assert buckets.clip_frames(200, Video(), WAN) == 81
        assert buckets.clip_frames(200, Video(num_frames=17), WAN) == 17

    def test_a_video_shorter_than_the_clip_is_named(self) -> None:
        found = buckets.clip_frames(80, Video(), WAN)
        assert found == UnfitFile("shorter than a clip of 81 frames", "80 frames")

    def test_limits(self) -> None:
        video = Video(num_frames=17, min_frames=33, max_frames=100)
        assert buckets.clip_frames(33, video, WAN) == 17
        assert buckets.clip_frames(100, video, WAN) == 17
        assert isinstance(found := buckets.clip_frames(32, video, WAN), UnfitFile)
        assert "min_frames" in found.reason
        assert isinstance(found := buckets.clip_frames(101, video, WAN), UnfitFile)
        assert "max_frames" in found.reason

    @settings(deadline=None)
    @given(st.integers(1, 500), st.one_of(st.none(), st.integers(1, 60)), st.booleans())
    def test_by_length(self, available: int, interval: int | None, resolution_frames: bool) -> None:
        video = (
            Video(bucket_strategy="resolution_frames", frame_interval=interval)
            if resolution_frames
            else Video(from_length=True, frame_interval=interval)
        )
        frames = buckets.clip_frames(available, video, WAN)
        if isinstance(frames, UnfitFile):
            assert interval is not None
            assert available < interval
            return
        assert frames % 4 == 1
        assert frames <= available
        assert available - frames < (interval or 1) + 4

    def test_min_frames_counts_what_is_left_after_fitting(self) -> None:
        video = Video(from_length=True, min_frames=17)
        assert buckets.clip_frames(17, video, WAN) == 17
        assert isinstance(buckets.clip_frames(16, video, WAN), UnfitFile)

    def test_resolution_frames_with_a_length_has_one_frame_bucket(self) -> None:
        video = Video(bucket_strategy="resolution_frames", num_frames=49, frame_interval=25)
        assert {buckets.clip_frames(n, video, WAN) for n in (49, 75, 300)} == {49}


class TestAudio:
    @settings(deadline=None)
    @given(st.floats(0.01, 600.0), st.floats(0.1, 30.0))
    def test_lengths_are_whole_columns_within_what_the_model_takes(self, seconds: float, interval: float) -> None:
        samples = buckets.audio_length(seconds, Audio(duration_interval=interval), AUDIO, 44_100)
        assert isinstance(samples, int)
        assert samples % 2048 == 0
        assert 2048 <= samples <= 2_097_152

    @settings(deadline=None)
    @given(st.floats(0.2, 40.0), st.floats(0.2, 10.0))
    def test_at_most_an_interval_is_cut_off(self, seconds: float, interval: float) -> None:
        samples = buckets.audio_length(seconds, Audio(duration_interval=interval), AUDIO, 44_100)
        assert isinstance(samples, int)
        if seconds >= interval:
            assert seconds - samples / 44_100 < interval + 2048 / 44_100 + 1e-3
            assert samples <= seconds * 44_100 * (1 + 1e-5) + 1 or samples == 2048

    @pytest.mark.parametrize(("seconds", "kept"), [(77.0, 45.0), (3.0, 3.0), (2.9999999, 3.0), (8.9, 6.0), (0.5, 3.0)])
    def test_intervals(self, seconds: float, kept: float) -> None:
        samples = buckets.audio_length(seconds, Audio(duration_interval=3.0), Geometry("audio"), 1000)
        capped = buckets.audio_length(seconds, Audio(duration_interval=3.0), AUDIO, 44_100)
        assert samples == (75_000 if seconds == 77.0 else kept * 1000)
        assert isinstance(capped, int)
        assert capped <= 47.6 * 44_100

    def test_too_long_is_named(self) -> None:
        found = buckets.audio_length(91.0, Audio(max_duration_seconds=90.0), AUDIO, 44_100)
        assert found == UnfitFile("longer than audio.max_duration_seconds 90", "91.0 s")
        assert isinstance(buckets.audio_length(90.0, Audio(max_duration_seconds=90.0), AUDIO, 44_100), int)
