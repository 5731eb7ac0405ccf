from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.cache.encoder import EncoderId
from gracetune.cache.keys import EntryOrigin, latent_key, latent_origin, text_key
from gracetune.data.refs import AppliedAugmentation, Bucket, Canny, CaptionRef, Clip, Fit, MaskRef, SampleRef, Transform
from unit.cache.samples import TEXT, VAE, ref

JITTER = Transform("ColorJitter", 0.5, (("hue", (-0.1, 0.1)), ("saturation", (0.8, 1.2))))
FULL = SampleRef(
    dataset="pairs",
    path="a/b.mp4",
    digest="d" * 32,
    bucket=Bucket(832, 480, 81, 0, 0),
    fit=Fit((1920, 1080), (854, 480), 11, 0),
    caption=CaptionRef("a red car", 2, False),
    clip=Clip(1.5, 5.0, 16.0, False, 44100, True),
    augmentation=AppliedAugmentation(True, False, 7, 3, (JITTER,), "e" * 32),
    conditioning=(ref(1), ref(2)),
    mask=MaskRef("masks", "b.png", "f" * 32, False, 0.1, False),
    loss_weight=0.5,
)


def augmented(**changes: object) -> SampleRef:
    return replace(FULL, augmentation=replace(FULL.augmentation, **changes))  # type: ignore[arg-type]


def changed(part: str, **changes: object) -> SampleRef:
    return replace(FULL, **{part: replace(getattr(FULL, part), **changes)})  # type: ignore[arg-type]


RELEVANT = {
    "digest": replace(FULL, digest="c" * 32),
    **{f"bucket.{name}": changed("bucket", **{name: 99}) for name in Bucket.__dataclass_fields__},
    "fit.original": changed("fit", original=(1921, 1080)),
    "fit.resized": changed("fit", resized=(854, 481)),
    "fit.left": changed("fit", left=12),
    "fit.top": changed("fit", top=1),
    "no fit": replace(FULL, fit=None),
    "clip.start": changed("clip", start=1.25),
    "clip.duration": changed("clip", duration=5.5),
    "clip.fps": changed("clip", fps=None),
    "clip.spread": changed("clip", spread=True),
    "clip.sample_rate": changed("clip", sample_rate=None),
    "clip.pad": changed("clip", pad=False),
    "clip.numbers": changed("clip", numbers=(0, 2, 4)),
    "no clip": replace(FULL, clip=None),
    "augmentation.flip_x": augmented(flip_x=False),
    "augmentation.flip_y": augmented(flip_y=True),
    "augmentation.seed": augmented(seed=8),
    "no seed": augmented(seed=None),
    "augmentation.epoch": augmented(epoch=4),
    "augmentation.transforms": augmented(transforms=(JITTER, JITTER)),
    "a transform's chance": augmented(transforms=(replace(JITTER, p=0.6),)),
    "a transform's method": augmented(transforms=(replace(JITTER, method="ToGray"),)),
    "a transform's range": augmented(transforms=(replace(JITTER, options=(("hue", (-0.1, 0.2)),)),)),
    "no transforms": augmented(transforms=()),
    "augmentation.of": augmented(of=None),
    "mask.digest": changed("mask", digest="0" * 32),
    "mask.from_alpha": changed("mask", from_alpha=True),
    "mask.min_weight": changed("mask", min_weight=0.2),
    "mask.invert": changed("mask", invert=True),
    "no mask": replace(FULL, mask=None),
    "canny": replace(FULL, canny=Canny(50.0, 100.0)),
    "canny.low": replace(FULL, canny=Canny(49.5, 100.0)),
    "canny.high": replace(FULL, canny=Canny(50.0, 101.0)),
    "conditioning, edges": replace(FULL, conditioning=(ref(1), replace(ref(2), canny=Canny(50.0, 100.0)))),
    "conditioning, fewer": replace(FULL, conditioning=(ref(1),)),
    "conditioning, order": replace(FULL, conditioning=(ref(2), ref(1))),
    "conditioning, crop": replace(FULL, conditioning=(ref(1), replace(ref(2), bucket=Bucket(32, 32)))),
    "conditioning, nested": replace(FULL, conditioning=(ref(1), replace(ref(2), conditioning=(ref(3),)))),
}

IRRELEVANT = {
    "dataset": replace(FULL, dataset="others"),
    "path": replace(FULL, path="renamed.mp4"),
    "caption": replace(FULL, caption=CaptionRef("", 0, True)),
    "loss_weight": replace(FULL, loss_weight=1.0),
    "normalises_mask": replace(FULL, normalises_mask=True),
    "mask.dataset": changed("mask", dataset="others"),
    "mask.path": changed("mask", path="other.png"),
    "a reference's path": replace(FULL, conditioning=(ref(1, path="x.png"), ref(2))),
    "a whole number for a float": changed("clip", duration=5, fps=16),
    "the order of a transform's options": augmented(transforms=(replace(JITTER, options=JITTER.options[::-1]),)),
}


@pytest.mark.parametrize("what", RELEVANT)
def test_what_decides_the_latents_decides_their_key(what: str) -> None:
    assert latent_key(RELEVANT[what], VAE) != latent_key(FULL, VAE)


def test_no_two_of_those_changes_give_the_same_key() -> None:
    keys = {latent_key(changed_ref, VAE) for changed_ref in RELEVANT.values()}
    assert len(keys) == len(RELEVANT) - 1  # without a seed and without transforms: nothing is random either way


@pytest.mark.parametrize("what", IRRELEVANT)
def test_what_does_not_decide_the_latents_does_not_decide_their_key(what: str) -> None:
    assert latent_key(IRRELEVANT[what], VAE) == latent_key(FULL, VAE)


def test_every_field_of_a_ref_was_tried() -> None:
    """A new field must be added to one of the two lists."""
    tried = {name.split(".")[0].split(",")[0] for name in (*RELEVANT, *IRRELEVANT)}
    assert {one.name for one in dataclasses.fields(SampleRef)} <= tried
    parts = {"bucket": Bucket, "fit": Fit, "clip": Clip, "augmentation": AppliedAugmentation, "mask": MaskRef,
             "canny": Canny}  # fmt: skip
    for name, part in parts.items():
        assert {f"{name}.{one.name}" for one in dataclasses.fields(part)} <= {*RELEVANT, *IRRELEVANT}


def test_draws_count_only_where_there_is_something_to_draw() -> None:
    """Therefore `refresh_each_epoch` with flips only encodes nothing twice."""
    plain = replace(FULL, augmentation=AppliedAugmentation(flip_x=True))
    later = replace(FULL, augmentation=AppliedAugmentation(flip_x=True, seed=9, epoch=5, of="a"))
    assert latent_key(plain, VAE) == latent_key(later, VAE)


def test_draws_of_its_own_digest_are_its_own() -> None:
    assert latent_key(augmented(of=None), VAE) == latent_key(augmented(of=FULL.digest), VAE)


ENCODERS: dict[str, Callable[[EncoderId], EncoderId]] = {
    "weights": lambda one: replace(one, weights="other"),
    "a setting": lambda one: replace(one, settings=(("dtype", "fp32"), *one.settings[1:])),
    "one more setting": lambda one: replace(one, settings=(*one.settings, ("tiling", "no"))),
    "one setting less": lambda one: replace(one, settings=one.settings[:1]),
}


@pytest.mark.parametrize("what", ENCODERS)
def test_another_encoder_is_another_key(what: str) -> None:
    change = ENCODERS[what]
    assert latent_key(FULL, change(VAE)) != latent_key(FULL, VAE)
    assert text_key("x", change(TEXT)) != text_key("x", TEXT)


def test_an_encoder_of_the_wrong_kind_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="'text'"):
        latent_key(FULL, TEXT)
    with pytest.raises(ValueError, match="'latent'"):
        text_key("x", VAE)


def test_an_embedding_depends_on_its_text_and_its_images_as_they_are_shown() -> None:
    edited, cut = replace(ref(1), digest="0" * 32), replace(ref(1), bucket=Bucket(32, 32))
    keys = [
        text_key("a", TEXT),
        text_key("b", TEXT),
        text_key("", TEXT),
        text_key("a", TEXT, (ref(1),)),
        text_key("a", TEXT, (ref(1), ref(2))),
        text_key("a", TEXT, (ref(2), ref(1))),
        text_key("a", TEXT, (edited,)),
        text_key("a", TEXT, (cut,)),
    ]
    assert len({*keys}) == len(keys)
    assert text_key("a", TEXT, (ref(1, path="renamed.png"),)) == text_key("a", TEXT, (ref(1),))


def test_a_key_stays_the_same_over_releases() -> None:
    """If this fails, all caches of users become useless. Increase KEY_VERSION only deliberately."""
    assert latent_key(FULL, VAE) == "99a65a020d9d7b49203f5917f662da67"
    assert text_key("a red car", TEXT, (ref(1),)) == "deeb6597badaac2c71498f8027c13fd2"


any_text = st.text(st.characters(), max_size=6)
any_parts = st.lists(st.tuples(any_text, any_text), max_size=4).map(tuple)
any_origin = st.builds(EntryOrigin, st.sampled_from(["latent", "text"]), any_text, any_parts)


@given(any_origin, any_origin)
def test_different_origins_have_different_keys(one: EntryOrigin, other: EntryOrigin) -> None:
    assert (one.key == other.key) == (one == other)


@given(st.lists(any_text, min_size=4, max_size=4), st.integers(1, 6), st.integers(1, 6))
def test_where_one_piece_ends_and_the_next_begins_is_part_of_the_key(parts: list[str], cut: int, other: int) -> None:
    """The same characters, split differently, give other keys."""
    joined = "".join(parts)
    one = EntryOrigin("latent", joined[:cut], ((joined[cut:], ""),))
    two = EntryOrigin("latent", joined[:other], ((joined[other:], ""),))
    assert (one.key == two.key) == (one == two)


def test_lone_surrogates_have_keys_of_their_own() -> None:
    assert text_key("\udc80", TEXT) != text_key("\udc81", TEXT) != text_key("?", TEXT)


def test_the_origin_tells_each_part_by_name() -> None:
    parts = dict(latent_origin(ref(5), VAE).parts)
    assert parts["bucket"] == "[64,64,1,0,0]"
    assert parts["fit"] == "[80,64,80,64,8,0]"
    assert parts["encoder.weights"] == "1234abcd"
    assert parts["encoder.settings.posterior"] == "mean"
