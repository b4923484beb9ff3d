"""The flags of bnzoo-train, by area. What they mean together is decided in `settings`."""

from __future__ import annotations

from .command_line import Flag, FlagGroups
from .placement import PLACEMENT_FLAGS
from .recipes import RECIPE_OF_MODEL, RECIPES
from .settings import PRECISIONS, SMALL_IMAGE

DATA_FLAGS = (
    Flag(
        "dataset",
        "string",
        "Data set: digits (scikit-learn's 1,797), the name of a TFDS data set such as mnist or "
        "imagenet2012, or folder:PATH, where images lie in PATH/<split>/<class>/. "
        "Default: the recipe's.",
    ),
    Flag(
        "data_dir", "string", "Folder of TFDS data sets. Default: TFDS' own, ~/tensorflow_datasets."
    ),
    Flag(
        "eval_split",
        "string",
        "Split to evaluate on, in TFDS' notation. Default: test or, without that, validation.",
    ),
)

TRAIN_FLAGS: FlagGroups = {
    "Run": (
        Flag(
            "run_dir",
            "string",
            "Folder of the run. A rerun of the same command continues it. "
            "Default: runs/<recipe>_<dataset>.",
        ),
        Flag("overwrite", "boolean", "Delete the run that is in run_dir and start anew.", False),
        Flag("seed", "integer", "Seed of weights, order, augmentation and dropout.", 0),
        Flag("checkpoint_every", "integer", "Steps from one checkpoint to the next.", 1000),
        Flag(
            "evaluate_every", "integer", "Steps from one evaluation to the next. Default: an epoch."
        ),
        Flag("log_every", "integer", "Steps from one row of metrics.csv to the next.", 100),
    ),
    "Devices": PLACEMENT_FLAGS,
    "Network": (
        Flag("model", "string", f"Network: {', '.join(RECIPE_OF_MODEL)}. Default: the recipe's."),
        Flag(
            "model_args",
            "list",
            "Arguments of the network besides those of the recipe, name=value,name=value; for "
            "example width_multiplier=0.25,stem=small. Images of up to "
            f"{SMALL_IMAGE} pixels a side get the small stem unless `stem` is given.",
        ),
        Flag("precision", "string", f"Type policy: {', '.join(PRECISIONS)}.", "float32"),
        Flag(
            "synchronized_batch_norm",
            "boolean",
            "Whether BN normalizes by the global batch where several devices train in step, not by "
            "each device's part of it.",
            True,
        ),
    ),
    "Data": (
        *DATA_FLAGS,
        Flag("train_split", "string", "Split to train on, in TFDS' notation.", "train"),
        Flag(
            "image_size",
            "integer",
            "Height and width of the network's input, in pixels. Default: the data set's own if "
            "its images have one, else the recipe's; 32 for digits.",
        ),
        Flag(
            "batch_size", "integer", "Examples in a batch, over all devices. Default: the recipe's."
        ),
        Flag(
            "augmentation",
            "string",
            "Random changes of the training images: crop (8% to 100% of the area, aspect ratio 3/4 "
            "to 4/3, mirrored), shift (up to 1/8 of the side, mirrored) or none. Default: none for "
            "characters, else shift for small images and crop for others.",
        ),
        Flag(
            "photometric",
            "float",
            "Brightness, contrast and colour are multiplied by a random factor in 1 +- this, where "
            "there is augmentation. Default: the recipe's.",
        ),
    ),
    "Optimization": (
        Flag("recipe", "string", f"Recipe: {', '.join(RECIPES)}. Default: the model's."),
        Flag("steps", "integer", "Steps in all; one step is one batch. Default: the recipe's."),
        Flag("learning_rate", "float", "Learning rate of the first step. Default: the recipe's."),
        Flag("momentum", "float", "Momentum of SGD, in [0, 1). Default: the recipe's."),
        Flag(
            "weight_decay",
            "float",
            "L2 weight: each kernel adds half of it times its squared norm to the loss. "
            "Default: the recipe's.",
        ),
        Flag(
            "learning_rate_schedule",
            "string",
            "How the learning rate falls: exponential, by decay_rate over each decay_epochs, or "
            "steps, by decay_rate at each of the boundaries. Default: the recipe's.",
        ),
        Flag(
            "decay_rate",
            "float",
            "Factor of the learning rate over each decay_epochs or at each of the boundaries, in "
            "(0, 1]. Default: the recipe's.",
        ),
        Flag("decay_epochs", "float", "Epochs between two such factors. Default: the recipe's."),
        Flag(
            "staircase",
            "boolean",
            "Whether the learning rate changes at the end of each decay_epochs alone, not with "
            "each step. Default: the recipe's.",
        ),
        Flag(
            "boundaries",
            "list",
            "Epochs after which the learning rate falls under --learning_rate_schedule=steps, "
            "rising; for example 30,60,90. Default: the recipe's.",
        ),
        Flag(
            "clip_norm",
            "float",
            "Gradients are scaled down where their L2 norm, over all variables together, is above "
            "this. Default: they are not.",
        ),
        Flag(
            "polyak",
            "float",
            "Decay of the moving averages of the weights, in (0, 1), such as 0.9999; the averages "
            "become the weights of model.keras. Default: none are kept.",
        ),
        Flag(
            "population_batches",
            "integer",
            "Training batches that BN's final statistics are taken from (Algorithm 2); 0 keeps the "
            "moving averages.",
            100,
        ),
    ),
    "Watching": (
        Flag(
            "bn_percentiles",
            "list",
            "Layers of whose inputs the 15th, 50th and 85th percentiles are written to the run's "
            "tensorboard folder with each row of metrics.csv: last, all (of BN), names of layers "
            "or, for one channel, NAME:CHANNEL. Default: none.",
        ),
        Flag(
            "profile_steps",
            "list",
            "FROM,TO: the steps behind FROM, up to TO, are profiled into the run's tensorboard "
            "folder. Default: none.",
        ),
    ),
}
