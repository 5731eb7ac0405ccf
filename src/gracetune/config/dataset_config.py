"""What a config says about one dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, Strict, StringConstraints, create_model, model_validator

from gracetune.config.base import (
    LONGEST_SIDE,
    BatchSize,
    Flag,
    Fraction,
    FrameRate,
    Name,
    NonNegativeFloat,
    Number,
    Options,
    PositiveFloat,
    PositiveInt,
    Secret,
    Section,
    Text,
    WholeNumber,
)
from gracetune.config.dataset_backends import BACKENDS, BackendName, is_installed
from gracetune.config.url_credentials import without_url_credentials

Resolution = Annotated[float, Strict(), Field(gt=0, le=LONGEST_SIDE)]
AspectRatio = Annotated[float, Strict(), Field(ge=0.001, le=1000)]


class InMemory(Section):
    """How a dataset of type `in_memory` is staged."""

    compression: Literal["none", "lz4", "zlib", "snappy", "zstd"] = "none"
    num_workers: Annotated[int, Strict(), Field(ge=1, le=1024)] | None = None
    """Staging threads; unset means min(72, CPUs)."""
    memory_limit_gb: Annotated[float, Strict(), Field(gt=0, le=1e6)] | None = None
    file_extensions: tuple[Name, ...] | None = None
    """Media to stage; unset means everything the dataset type can read."""


ACCESS_PROTOCOLS = ("s3", "s3a", "hf", "http", "https")
"""Of storage that `storage` can say something about."""
_SPLIT_PART = r"[^\[\]+]+(\[(-?\d+%?)?:(-?\d+%?)?\])?"
Split = Annotated[str, Strict(), StringConstraints(pattern=rf"^{_SPLIT_PART}(\+{_SPLIT_PART})*$")]


class StorageAccess(Section):
    """How the storage of a URL is reached. What is unset, its library finds itself: environment variables, its files.

    Secrets are shown and logged nowhere; the config.yaml in a run's folder has them, for its owner alone.
    """

    endpoint_url: Name | None = None
    """Of S3-compatible storage, or of a hub; unset means the library's own."""
    region: Name | None = None
    anonymous: Flag = False
    """Of a public bucket: send no credentials."""
    access_key_id: Secret = None
    secret_access_key: Secret = None
    session_token: Secret = None
    token: Secret = None
    """Of the hub; unset means HF_TOKEN or what `hf auth login` stored."""
    user: Name | None = None
    """Of a web server. Name and password before the `@` of a web address become `user` and `password`."""
    password: Secret = None
    """Of the user; without one it is a token, which stands alone before the `@`."""
    signature: Secret = None
    """What stands behind the `?` of a web address. Taken out of the path."""


class RowFilter(Section):
    """Rows whose column passes are kept; both conditions hold where both are given."""

    column: Name
    """`quality.score` is the value `score` inside column `quality`."""
    minimum: Number | None = None
    """A row without a number there counts as 0."""
    one_of: tuple[Text, ...] = ()


class Tile(Section):
    """Pictures that hold several side by side, of which one is trained on."""

    count: Annotated[int, Strict(), Field(ge=2, le=64)]
    index: WholeNumber = 0
    """From the left, counted from 0."""


class LocalCopy(Section):
    """The copy of a URL's data on this machine's disk: what of it is taken, and how it is read."""

    folder: Name | None = None
    """Where copies are kept; unset means `downloads` in the run's cache folder."""
    format: Literal["auto", "files", "parquet", "archives", "urls"] = "auto"
    """`files` are media as they are; `parquet` and `archives` (tar, zip) hold them; `urls` is a table of addresses."""
    split: Split | None = None
    """As the hub's `datasets` library writes it: `train`, `train+test`, `train[:100]`, `train[10%:20%]`. Unset means
    `train` of a hub's dataset, and everything of other storage."""
    subset: Name | None = None
    """Where a hub's dataset has several (`config_name`); unset means its default."""
    media_column: Name | None = None
    """Of tables: the column of the media; unset means `image`, `video` or `audio`, after the dataset's type."""
    index: Name | None = None
    """Folder or URL of the archives' index files (`SHARD.json`, captions by member); unset means beside them."""
    filter: tuple[RowFilter, ...] = ()
    tile: Tile | None = None


class CaptionTable(Section):
    """Captions (and sizes) kept in one Parquet, CSV or JSONL file."""

    path: Name
    filename_column: Name = "filename"
    caption_column: Name | Annotated[tuple[Name, ...], Field(min_length=1)] = "caption"
    """Several columns are several captions of a sample. `a.b` is the value `b` inside column `a`."""
    fallback_caption_column: Name | None = None
    width_column: Name | None = None
    height_column: Name | None = None
    identifier_includes_extension: Flag = True


class Captions(Section):
    """Where captions come from and what is done to them."""

    strategy: Literal["textfile", "filename", "instanceprompt", "parquet", "csv", "jsonl", "json"] = "textfile"
    extension: Name = "txt"
    default: Text | None = None
    """Taken where a file has no caption of its own."""
    default_for_empty: Flag = False
    """`default` is taken where a caption is empty, too."""
    instance_prompt: Text | None = None
    prepend_instance_prompt: Flag = False
    trigger_word: Text | None = None
    """Replaces `[trigger]`, and is put in front of captions that do not contain it."""
    add_trigger: Flag = True
    """False: the trigger word replaces `[trigger]` and is not added to other captions."""
    split_lines: Flag = True
    """Each line of a text file is a caption of its own."""
    dropout: Fraction = 0.0
    dropped_caption: Text = ""
    """What a dropped caption is replaced by."""
    shuffle_tags: Flag = False
    keep_tags: WholeNumber = 0
    """This many leading tags stay where they are when the rest is shuffled."""
    shuffle_variants: Annotated[int, Strict(), Field(ge=1, le=1000)] | Literal["visits"] = 1
    """Orders of the tags that are cached, of which each visit takes one at random. `visits`: each visit has an order of
    its own, until 100 are used up."""
    shuffle_written: Flag = True
    """The order as written is one more of them."""
    shuffle_trigger: Flag = False
    """The trigger word moves with the tag it is put in front of; otherwise it stays in front of the caption."""
    tag_separator: Text = ","
    table: CaptionTable | None = None


class Crop(Section):
    enabled: Flag = False
    style: Literal["random", "center", "corner", "face"] = "random"
    aspect: Literal["square", "preserve", "closest", "random"] = "square"
    aspect_buckets: tuple[Annotated[float, Strict(), Field(ge=1 / 16, le=16)], ...] = ()


class Buckets(Section):
    """Which sizes images are trained at."""

    rule: Literal["nearest", "at_most", "rounded_edge"] = "nearest"
    """`nearest`: each side is the multiple nearest to what `resolution` and the aspect ratio ask for. `at_most`: the
    area is at most that of `resolution` and close to the image's own, so that images are not enlarged. `rounded_edge`:
    the edge of the square is rounded to the multiple first, and squares of about 0.25, 0.5, 1, 2 and 4 megapixels have
    edges of 512, 768, 1024, 1536 and 2048."""
    multiple: Annotated[int, Strict(), Field(ge=1, le=1024)] | None = None
    """Both sides are multiples of this; unset means the family's own."""
    aspect_decimals: Annotated[int, Strict(), Field(ge=1, le=9)] = 2
    """Aspect ratios are rounded to this many decimals: with 2, images of 1.5 and 1.504 share a bucket."""


class Augmentation(Section):
    """What is varied between two visits of the same sample, and how that meets the latent cache."""

    flip_x: Flag = False
    flip_y: Flag = False
    transforms: tuple[Options, ...] = ()
    cache_mode: Literal["disable_cache", "static", "refresh_each_epoch"] = "disable_cache"


class Video(Section):
    num_frames: PositiveInt | None = None
    """Frames per clip (4k+1); unset means the family's own length."""
    fps: FrameRate | None = None
    """Resample to this rate; unset keeps every frame as it is."""
    min_frames: PositiveInt | None = None
    max_frames: PositiveInt | None = None
    clip: Literal["head", "uniform", "random"] = "head"
    whole_clip: Flag = False
    """Spread `num_frames` over the whole file instead of cutting a piece out of it."""
    from_length: Flag = False
    """Take as many frames as each file has (4k+1) instead of `num_frames`."""
    frame_choice: Literal["timestamps", "numbers"] = "timestamps"
    """`timestamps`: the frames on screen at evenly spaced times. `numbers`: frames are counted: every n-th of them,
    where n is the file's rate divided by `fps` and rounded; `whole_clip` from the first to the last. A file that is too
    short is spread over the clip and repeats frames."""
    frame_step: PositiveInt | None = None
    """A file counts as having k times this plus 1 frames, whatever it has more; unset means as many as it has."""
    allow_shorter: Flag = False
    """Files with fewer than `num_frames` frames, but at least `min_frames`, are trained with the frames they have."""
    image_to_video: Flag = False
    bucket_strategy: Literal["aspect_ratio", "resolution_frames"] = "aspect_ratio"
    frame_interval: PositiveInt | None = None


class Audio(Section):
    sample_rate: Annotated[int, Strict(), Field(ge=1, le=1_000_000)] | None = None
    """Unset means the family's own rate."""
    channels: Annotated[int, Strict(), Field(ge=1, le=64)] | None = None
    duration_interval: Annotated[float, Strict(), Field(ge=0.01, le=86_400)] = 3.0
    max_duration_seconds: Annotated[float, Strict(), Field(gt=0, le=86_400)] | None = None
    truncation: Literal["beginning", "end", "random"] = "beginning"


class Mask(Section):
    """Masked loss: white is learnt, black counts `min_weight`."""

    path: Name | None = None
    from_alpha: Flag = False
    min_weight: Fraction = 0.0
    invert: Flag = False
    normalise: Flag = False
    """Weights are divided by their mean over the batch, so that masked samples count as much as others."""


class CannyReference(Section):
    """Thresholds of Canny's edge detection: strengths of the image's gradient, at most 1140."""

    low_threshold: Annotated[float, Strict(), Field(gt=0, le=2000)] = 50.0
    """Pixels of this strength are edges if they are connected to a stronger one."""
    high_threshold: Annotated[float, Strict(), Field(gt=0, le=2000)] = 100.0
    """Pixels of this strength are edges."""


class Dataset(Section):
    """One source of samples."""

    id: Name
    path: Name
    type: BackendName = "local"
    dataset_type: Literal["image", "video", "audio", "conditioning", "eval"] = "image"
    disabled: Flag = False
    in_memory: InMemory = InMemory()
    storage: StorageAccess | None = None
    """For a `path` that is a URL."""
    local_copy: LocalCopy | None = None
    """How the copy of a URL is made. A URL of type `local` always has one; one of type `in_memory` where this is set.
    With a folder as `path`, its archives or tables are unpacked into a copy."""

    resolution: Resolution = 1024
    """Pixels, or megapixels where `resolution_type` is `area`."""
    resolution_type: Literal["pixel", "pixel_area", "area"] = "pixel_area"
    buckets: Buckets = Buckets()
    minimum_size: NonNegativeFloat = 0
    minimum_edge: NonNegativeFloat = 0
    """Images with a side of fewer pixels are left out, whatever `resolution_type` is."""
    maximum_size: PositiveFloat | None = None
    downsample_to: Resolution | None = None
    """Images are scaled to this before they are cropped: all of them, or with `maximum_size` those above it."""
    minimum_aspect_ratio: AspectRatio | None = None
    maximum_aspect_ratio: AspectRatio | None = None
    crop: Crop = Crop()
    captions: Captions = Captions()
    augmentation: Augmentation = Augmentation()
    video: Video = Video()
    audio: Audio = Audio()
    mask: Mask = Mask()

    repeats: Annotated[int, Strict(), Field(ge=0, le=1_000_000)] = 0
    """Extra visits per epoch: 0 is once, 1 is twice."""
    kohya_folders: Flag = True
    """Folders named for kohya's scripts count: `10_sks dog` is ten visits, and a caption for files without one."""
    probability: PositiveFloat = 1.0
    batch_size: BatchSize | None = None
    max_samples: PositiveInt | None = None
    held_out: WholeNumber = 0
    """This many of its files are never trained on; `validation.loss_every_steps` measures the loss on them. They are
    chosen by their content: the same ones in every run, and mostly the same when files are added."""
    start_epoch: PositiveInt = 1
    end_epoch: PositiveInt | None = None
    start_step: WholeNumber = 0
    end_step: PositiveInt | None = None
    even_steps: Flag = False
    """Every second optimizer step takes its batches from such datasets alone, the other steps from the other datasets:
    steps 2, 4, 6 and so on, counted from 0, without multiples of `checkpoints.every_steps` and of
    `validation.every_steps`. The dataset begins anew whenever it is used up, and epochs do not count it."""
    turn: Annotated[int, Strict(), Field(ge=0, le=1000)] | None = None
    """Datasets are taken in the order of their turns, one batch each; unset comes last. If no dataset has a turn, they
    are mixed."""
    regularisation: Flag = False
    """An adapter learns the base model's own answer on these samples, so that it changes less beside its subject."""
    loss_weight: Annotated[float, Strict(), Field(ge=0, le=1e300)] = 1.0
    """What is too much for a loss ends the run at the first batch that has it, before anything is learnt from it."""
    adapter_strength: Number = 1.0

    conditioning: tuple[Name, ...] = ()
    """Ids of the datasets that hold this one's edit sources or references, matched by file stem."""
    conditioning_type: Literal["reference_strict", "reference_loose", "mask"] | None = None
    source_dataset_id: Name | None = None
    canny_reference: CannyReference | None = None
    """The edges of each image are one more reference of it, scaled and cut as the image is. `{}` is enough."""
    cache_dir: Name | None = None
    """A latent cache folder of its own; unset means `cache.vae_cache_dir`, or one below the run's cache folder."""
    cache_latents: Literal["disk", "memory", "none"] | None = None
    """Overrides `cache.vae_cache_type` for this dataset."""
    corrupt_threshold: Fraction = 0.01
    """Unreadable files up to this share are listed and left out; more stop the run."""

    _clean_path = model_validator(mode="before")(staticmethod(without_url_credentials))

    @property
    def has_local_copy(self) -> bool:
        """Whether its files are brought to this machine's disk before they are read."""
        return self.local_copy is not None or (self.type == "local" and "://" in self.path)

    @property
    def has_references(self) -> bool:
        """Whether it names datasets of references, or each image has its own edges as one."""
        return bool(self.conditioning) or self.canny_reference is not None

    @property
    def has_masks(self) -> bool:
        """Whether its loss is masked (of a dataset of masks: whether it masks another's)."""
        return self.mask.path is not None or self.mask.from_alpha or self.conditioning_type == "mask"

    @property
    def encodes_each_visit(self) -> bool:
        """Whether latents are not cached at all."""
        changing = bool(self.augmentation.transforms) and self.augmentation.cache_mode == "disable_cache"
        return self.cache_latents == "none" or changing


BACKEND_SECTIONS: tuple[str, ...] = tuple(
    name
    for name in BACKENDS.names
    if is_installed(name) and name.isidentifier() and not name.startswith("_")
    if name not in Dataset.model_fields and not hasattr(Dataset, name)
)
"""Installed backends whose options have a section of a dataset, as `in_memory` is one; without names that are taken."""

if not TYPE_CHECKING and BACKEND_SECTIONS:
    Dataset = create_model(
        "Dataset",
        __base__=Dataset,
        __doc__=Dataset.__doc__,
        __module__=__name__,
        **{name: (Options, Field(default_factory=dict)) for name in BACKEND_SECTIONS},
    )
