"""The sections of a config that describe one dataset."""

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
from gracetune.config.registry import BACKENDS, BackendName, is_installed
from gracetune.config.url_credentials import without_url_credentials

Resolution = Annotated[float, Strict(), Field(gt=0, le=LONGEST_SIDE)]
AspectRatio = Annotated[float, Strict(), Field(ge=0.001, le=1000)]


class InMemory(Section):
    """How a dataset of type `in_memory` is copied into host memory."""

    compression: Literal["none", "lz4", "zlib", "snappy", "zstd"] = "none"
    """Compression of the files in memory. Files that do not shrink are kept as they are."""
    num_workers: Annotated[int, Strict(), Field(ge=1, le=1024)] | None = None
    """Staging threads; unset means min(72, CPUs)."""
    memory_limit_gb: Annotated[float, Strict(), Field(gt=0, le=1e6)] | None = None
    """Stop before or during staging if the copy needs more than this."""
    file_extensions: tuple[Name, ...] | None = None
    """Extensions of the files to stage; unset means every format the dataset type can read."""


ACCESS_PROTOCOLS = ("s3", "s3a", "hf", "http", "https")
"""URL schemes that `Dataset.storage` has options for."""
_SPLIT_PART = r"[^\[\]+]+(\[(-?\d+%?)?:(-?\d+%?)?\])?"
Split = Annotated[str, Strict(), StringConstraints(pattern=rf"^{_SPLIT_PART}(\+{_SPLIT_PART})*$")]


class StorageAccess(Section):
    """How to reach the storage of a URL. Unset options are left to its library (environment variables, its own files).

    Secrets are never shown or logged. The config.yaml in a run's folder has them, and only its owner can read it.
    """

    endpoint_url: Name | None = None
    """URL of S3-compatible storage or of a hub; unset means the library's own."""
    region: Name | None = None
    """Region of S3-compatible storage; unset means the library's own."""
    anonymous: Flag = False
    """Send no credentials, as public buckets require."""
    access_key_id: Secret = None
    """Access key of S3-compatible storage; better set as AWS_ACCESS_KEY_ID."""
    secret_access_key: Secret = None
    """Secret key of `access_key_id`; better set as AWS_SECRET_ACCESS_KEY."""
    session_token: Secret = None
    """Token of temporary S3 credentials; better set as AWS_SESSION_TOKEN."""
    token: Secret = None
    """Token for the hub; unset means HF_TOKEN or what `hf auth login` stored."""
    user: Name | None = None
    """User name for a web server. Name and password before the `@` of a URL become `user` and `password`."""
    password: Secret = None
    """Password of `user`. Without a `user` it is a token, which stands alone before the `@` of a URL."""
    signature: Secret = None
    """Query string of a signed URL, the part after the `?`. It is removed from the path."""


class RowFilter(Section):
    """Keeps the rows whose column passes. If both conditions are given, a row has to pass both."""

    column: Name
    """`quality.score` is the value `score` inside column `quality`."""
    minimum: Number | None = None
    """A row without a number in this column counts as 0."""
    one_of: tuple[Text, ...] = ()
    """Keep rows with one of these values."""


class Tile(Section):
    """For image files that hold several images side by side: which of them is trained on."""

    count: Annotated[int, Strict(), Field(ge=2, le=64)]
    """Number of images side by side in a file."""
    index: WholeNumber = 0
    """Position of the image, counted from 0 at the left."""


class LocalCopy(Section):
    """The copy of a URL's data on this machine's disk: which part is copied, and how it is read."""

    folder: Name | None = None
    """Folder of the copies; unset means `downloads` in the run's cache folder."""
    format: Literal["auto", "files", "parquet", "archives", "urls"] = "auto"
    """`files`: media files. `parquet`, `archives` (tar, zip): files that contain media. `urls`: a table of URLs."""
    split: Split | None = None
    """Split in the notation of the `datasets` library: `train`, `train+test`, `train[:100]`, `train[10%:20%]`. Unset
    means `train` for a dataset of the hub, and everything for other storage."""
    subset: Name | None = None
    """Subset of a dataset of the hub (`config_name`); unset means its default."""
    media_column: Name | None = None
    """Column of a table that holds the media; unset means `image`, `video` or `audio`, after the dataset's type."""
    index: Name | None = None
    """Folder or URL of the archives' index files (`SHARD.json`, captions by member); unset means next to them."""
    filter: tuple[RowFilter, ...] = ()
    """Keep only the rows of a table that pass every filter."""
    tile: Tile | None = None
    """Which one of several images in a file is trained on; unset means the whole file."""


class CaptionTable(Section):
    """One Parquet, CSV or JSONL file with the captions (and sizes) of a dataset."""

    path: Name
    """The table: a path below the dataset's folder, or any other path."""
    filename_column: Name = "filename"
    """Column with the names of the media files."""
    caption_column: Name | Annotated[tuple[Name, ...], Field(min_length=1)] = "caption"
    """Several columns give a sample several captions. `a.b` is the value `b` inside column `a`."""
    fallback_caption_column: Name | None = None
    """Column to use for a row whose `caption_column` is empty."""
    width_column: Name | None = None
    """Column with the width of the file. A note names files of another size."""
    height_column: Name | None = None
    """Column with the height of the file."""
    identifier_includes_extension: Flag = True
    """False: names in `filename_column` have no extension."""


class Captions(Section):
    """Where captions come from and how they are changed."""

    strategy: Literal["textfile", "filename", "instanceprompt", "parquet", "csv", "jsonl", "json"] = "textfile"
    """`textfile`: a text file beside each media file. `filename`: the file's name. `instanceprompt`: `instance_prompt`
    for all files. The others: a table of this format, named in `table`."""
    extension: Name = "txt"
    """Extension of caption files."""
    default: Text | None = None
    """Caption of files that have none of their own."""
    default_for_empty: Flag = False
    """Use `default` for empty captions too."""
    instance_prompt: Text | None = None
    """Caption of all files with `strategy: instanceprompt`, or the text for `prepend_instance_prompt`."""
    prepend_instance_prompt: Flag = False
    """Put `instance_prompt` in front of every caption."""
    trigger_word: Text | None = None
    """Replaces `[trigger]`, and is prepended to captions that do not contain it."""
    add_trigger: Flag = True
    """False: the trigger word replaces `[trigger]` and is not added to other captions."""
    split_lines: Flag = True
    """Treat each line of a text file as a separate caption."""
    dropout: Fraction = 0.0
    """Share of visits whose caption is replaced by `dropped_caption`."""
    dropped_caption: Text = ""
    """Caption that replaces a dropped one."""
    shuffle_tags: Flag = False
    """Shuffle the tags of captions. Each order is cached as a separate caption."""
    keep_tags: WholeNumber = 0
    """Number of leading tags that keep their place when the rest is shuffled."""
    shuffle_variants: Annotated[int, Strict(), Field(ge=1, le=1000)] | Literal["visits"] = 1
    """Number of tag orders that are cached; each visit uses one of them at random. `visits`: each visit has an order of
    its own, up to 100 orders."""
    shuffle_written: Flag = True
    """Use the order as written as one more variant."""
    shuffle_trigger: Flag = False
    """Shuffle the trigger word along with the first tag; otherwise it stays at the start of the caption."""
    tag_separator: Text = ","
    """Text between two tags."""
    table: CaptionTable | None = None
    """The table of captions."""


class Crop(Section):
    enabled: Flag = False
    """Crop images to the aspect ratio that `aspect` chooses. Without it, an image keeps its shape up to the rounding of
    its bucket."""
    style: Literal["random", "center", "corner", "face"] = "random"
    """Position of the crop: random, in the center, or at the top left (`corner`). `face` is rejected: faces are not
    detected."""
    aspect: Literal["square", "preserve", "closest", "random"] = "square"
    """Aspect ratio of the crop. `square`: 1. `preserve`: the image's own. `closest`: the one of `aspect_buckets` that
    cuts off least. `random`: a random one of them, chosen once per file."""
    aspect_buckets: tuple[Annotated[float, Strict(), Field(ge=1 / 16, le=16)], ...] = ()
    """Ratios of width to height for `aspect: closest` and `aspect: random`."""


class Buckets(Section):
    """The sizes that images are trained at."""

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
    """Random changes between two visits of the same sample, and how the latent cache handles them."""

    flip_x: Flag = False
    """Mirror samples left to right in half of their visits."""
    flip_y: Flag = False
    """Mirror samples top to bottom in half of their visits."""
    transforms: tuple[Options, ...] = ()
    """Random changes with the names and options of albumentations, for example `{method: ColorJitter, hue: 0.1, p:
    0.5}`."""
    cache_mode: Literal["disable_cache", "static", "refresh_each_epoch"] = "disable_cache"
    """What becomes of cached latents of a dataset with random changes. `disable_cache`: datasets with `transforms` are
    encoded anew at every visit. `static`: changes are sampled once per file. `refresh_each_epoch`: once per epoch,
    encoded in the background."""


class Video(Section):
    num_frames: PositiveInt | None = None
    """Frames per clip (4k+1); unset means the family's own length."""
    fps: FrameRate | None = None
    """Resample to this frame rate; unset keeps every frame."""
    min_frames: PositiveInt | None = None
    """Leave out files with fewer frames."""
    max_frames: PositiveInt | None = None
    """Leave out files with more frames."""
    clip: Literal["head", "uniform", "random"] = "head"
    """Position of the clip in the file: `head`, `random`, or `uniform`, consecutive clips, one per visit."""
    whole_clip: Flag = False
    """Spread `num_frames` over the whole file instead of cutting out a clip."""
    from_length: Flag = False
    """Take as many frames as each file has (4k+1) instead of `num_frames`."""
    frame_choice: Literal["timestamps", "numbers"] = "timestamps"
    """`timestamps`: the frames on screen at evenly spaced times. `numbers`: every n-th frame, where n is the file's
    frame rate divided by `fps` and rounded; with `whole_clip`, from the first frame to the last. A file that is too
    short is spread over the clip and repeats frames."""
    frame_step: PositiveInt | None = None
    """A file's number of frames is rounded down to a multiple of this plus 1; unset means that all frames count."""
    allow_shorter: Flag = False
    """Train on files with fewer than `num_frames` frames, but at least `min_frames`, with the frames they have."""
    image_to_video: Flag = False
    """Keep the first frame free of noise, so that the model learns to continue an image. For Wan weights with an
    image-to-video mode."""
    bucket_strategy: Literal["aspect_ratio", "resolution_frames"] = "aspect_ratio"
    """`resolution_frames` without `num_frames` takes as many frames as each file has, like `from_length`."""
    frame_interval: PositiveInt | None = None
    """With a length taken from the file: round the number of frames down to a multiple of this."""


class Audio(Section):
    sample_rate: Annotated[int, Strict(), Field(ge=1, le=1_000_000)] | None = None
    """Unset means the family's own rate."""
    channels: Annotated[int, Strict(), Field(ge=1, le=64)] | None = None
    """Channels to mix the audio to; unset means the family's own."""
    duration_interval: Annotated[float, Strict(), Field(ge=0.01, le=86_400)] = 3.0
    """Clips are cut to a multiple of this many seconds. Shorter files are padded with silence."""
    max_duration_seconds: Annotated[float, Strict(), Field(gt=0, le=86_400)] | None = None
    """Leave out longer files."""
    truncation: Literal["beginning", "end", "random"] = "beginning"
    """Which part of a file is kept when it is cut."""


class Mask(Section):
    """Masked loss: white areas have weight 1, black ones `min_weight`."""

    path: Name | None = None
    """Folder of mask images with the names of the media files."""
    from_alpha: Flag = False
    """Use the images' own alpha channel as the mask."""
    min_weight: Fraction = 0.0
    """Weight of black areas."""
    invert: Flag = False
    """Exchange white and black."""
    normalise: Flag = False
    """Divide the weights by their mean over the batch, so that masked samples count as much as others."""


class CannyReference(Section):
    """Thresholds of Canny's edge detection, as magnitudes of the image's gradient, which is at most 1140."""

    low_threshold: Annotated[float, Strict(), Field(gt=0, le=2000)] = 50.0
    """Pixels of this gradient are edges if they are connected to one above `high_threshold`."""
    high_threshold: Annotated[float, Strict(), Field(gt=0, le=2000)] = 100.0
    """Pixels of this gradient are always edges."""


class Dataset(Section):
    """One source of samples."""

    id: Name
    """Name of the dataset. Other keys, messages and `--set 'datasets[ID].key=value'` use it."""
    path: Name
    """Folder of the files, or a URL: `hf://datasets/OWNER/NAME`, `s3://bucket/folder`, `https://...`."""
    type: BackendName = "local"
    """How files are read. `local`: from a folder, or from a local copy of a URL. `in_memory`: copied into host memory
    first. `url`: over the network at every access. Other names are backends of installed packages."""
    dataset_type: Literal["image", "video", "audio", "conditioning", "eval"] = "image"
    """What the files are. `conditioning`: references or masks of another dataset. `eval`: never trained on; the
    held-out loss is measured on them."""
    disabled: Flag = False
    """Leave the dataset out of the run."""
    in_memory: InMemory = InMemory()
    """Options of `type: in_memory`."""
    storage: StorageAccess | None = None
    """Access options of a `path` that is a URL."""
    local_copy: LocalCopy | None = None
    """How a URL is copied to this machine. A dataset of type `local` always has a copy, one of type `in_memory` only if
    this is set. If `path` is a folder, its archives or tables are unpacked into a copy."""

    resolution: Resolution = 1024
    """In pixels, or in megapixels with `resolution_type: area`."""
    resolution_type: Literal["pixel", "pixel_area", "area"] = "pixel_area"
    """Unit of `resolution`. `pixel_area`: the side of a square with the same area. `pixel`: the shorter side. `area`:
    megapixels."""
    buckets: Buckets = Buckets()
    """How the sizes of training images are chosen."""
    minimum_size: NonNegativeFloat = 0
    """Leave out images smaller than this, in the unit of `resolution_type`."""
    minimum_edge: NonNegativeFloat = 0
    """Leave out images with a side shorter than this, in pixels for every `resolution_type`."""
    maximum_size: PositiveFloat | None = None
    """With `downsample_to`: only images above this size, in the unit of `resolution_type`, are scaled down."""
    downsample_to: Resolution | None = None
    """Scale images to this before cropping: all of them or, with `maximum_size`, the ones above that size."""
    minimum_aspect_ratio: AspectRatio | None = None
    """Leave out images with a smaller ratio of width to height."""
    maximum_aspect_ratio: AspectRatio | None = None
    """Leave out images with a larger ratio of width to height."""
    crop: Crop = Crop()
    """How images are cropped."""
    captions: Captions = Captions()
    """Where captions come from and how they are changed."""
    augmentation: Augmentation = Augmentation()
    """Flips and other random changes of the images."""
    video: Video = Video()
    """Options of clips."""
    audio: Audio = Audio()
    """Options of audio files."""
    mask: Mask = Mask()
    """Masks that weight the loss by area."""

    repeats: Annotated[int, Strict(), Field(ge=0, le=1_000_000)] = 0
    """Extra visits per epoch: 0 visits each sample once, 1 twice."""
    kohya_folders: Flag = True
    """Read folder names as kohya's scripts do: `10_sks dog` means ten visits, and a caption for files without one."""
    probability: PositiveFloat = 1.0
    """Weight in the random choice of each batch's dataset. A higher value brings the dataset earlier in an epoch, not
    more often."""
    batch_size: BatchSize | None = None
    """Batch size of this dataset; unset means `training.batch_size`."""
    max_samples: PositiveInt | None = None
    """Use at most this many samples, chosen by their content: the same ones in every run."""
    held_out: WholeNumber = 0
    """Number of files that are never trained on; `validation.loss_every_steps` measures the loss on them. They are
    chosen by their content: every run holds out the same ones, and mostly still does after files are added."""
    start_epoch: PositiveInt = 1
    """First epoch, counted from 1, in which the dataset is used."""
    end_epoch: PositiveInt | None = None
    """Last epoch in which the dataset is used; unset means no end."""
    start_step: WholeNumber = 0
    """First optimizer step, counted from 0, at which the dataset is used."""
    end_step: PositiveInt | None = None
    """Optimizer step from which on the dataset is no longer used; unset means no end."""
    even_steps: Flag = False
    """Every second optimizer step takes its batches only from datasets with this flag, the other steps from the other
    datasets. These are steps 2, 4, 6 and so on, counted from 0, except multiples of `checkpoints.every_steps` and of
    `validation.every_steps`. The dataset starts over when it is used up, and does not count towards epochs."""
    turn: Annotated[int, Strict(), Field(ge=0, le=1000)] | None = None
    """Datasets take turns in this order, one batch each; those without a turn come last. If no dataset has a turn,
    batches of all datasets are mixed."""
    regularisation: Flag = False
    """Train the adapter towards the base model's own prediction on these samples, so that it changes little apart from
    its subject."""
    loss_weight: Annotated[float, Strict(), Field(ge=0, le=1e300)] = 1.0
    """A weight that makes the loss non-finite stops the run at the first such batch, before the optimizer step."""
    adapter_strength: Number = 1.0
    """Factor of the adapter's output while it is trained on this dataset."""

    conditioning: tuple[Name, ...] = ()
    """Ids of the datasets with this one's edit sources or references. Files are matched by stem."""
    conditioning_type: Literal["reference_strict", "reference_loose", "mask"] | None = None
    """Role of a dataset of type `conditioning`. `reference_strict`: scaled and cropped exactly as its target.
    `reference_loose`: keeps its own shape and has its own `resolution`. `mask`: weights of the loss. Unset means
    `reference_loose`."""
    source_dataset_id: Name | None = None
    """Id of the dataset that this one has the references or masks for: `conditioning`, written on the other side."""
    canny_reference: CannyReference | None = None
    """Use the edges of each image as one more reference, scaled and cropped like the image. `{}` is enough."""
    cache_dir: Name | None = None
    """Folder of this dataset's latent cache; unset means `cache.vae_cache_dir`, or one below the run's cache folder."""
    cache_latents: Literal["disk", "memory", "none"] | None = None
    """Overrides `cache.vae_cache_type` for this dataset."""
    corrupt_threshold: Fraction = 0.05
    """Largest share of unreadable files. Up to this share they are listed and left out; more stop the run."""

    _clean_path = model_validator(mode="before")(staticmethod(without_url_credentials))

    @property
    def is_staged(self) -> bool:
        """Whether the files are copied into host memory before they are read."""
        return self.type == "in_memory"

    @property
    def reads_folder(self) -> bool:
        """Whether the files are read from a folder of this machine: `path`, or its local copy."""
        return self.type in ("local", "in_memory")

    @property
    def has_local_copy(self) -> bool:
        """Whether the files are copied to this machine's disk before they are read."""
        return self.local_copy is not None or (self.type == "local" and "://" in self.path)

    @property
    def has_references(self) -> bool:
        """Whether samples have reference images: from other datasets, or generated edges."""
        return bool(self.conditioning) or self.canny_reference is not None

    @property
    def has_masks(self) -> bool:
        """Whether the loss of this dataset is masked, or this is a dataset of masks for another one."""
        return self.mask.path is not None or self.mask.from_alpha or self.conditioning_type == "mask"

    @property
    def encodes_each_visit(self) -> bool:
        """Whether latents are encoded anew at each visit, without a cache."""
        changing = bool(self.augmentation.transforms) and self.augmentation.cache_mode == "disable_cache"
        return self.cache_latents == "none" or changing


BACKEND_SECTIONS: tuple[str, ...] = tuple(
    name
    for name in BACKENDS.names
    if is_installed(name) and name.isidentifier() and not name.startswith("_")
    if name not in Dataset.model_fields and not hasattr(Dataset, name)
)
"""Installed backends whose options are a section of `Dataset`, as `in_memory` is. Names that are taken are excluded."""

if not TYPE_CHECKING and BACKEND_SECTIONS:
    Dataset = create_model(
        "Dataset",
        __base__=Dataset,
        __doc__=Dataset.__doc__,
        __module__=__name__,
        **{
            name: (Options, Field(default_factory=dict, description=f"Options of the installed backend {name}."))
            for name in BACKEND_SECTIONS
        },
    )
