"""The one registry of commands: data only; options and work are named by address and loaded when needed."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A command, or a builder of ``ncm data``. How its result is shown: ``run`` in ``commands/NAME.py``."""

    sentence: str
    options: str = ""
    """Module and class, below ``ncm_cli``."""
    work: str | None = None
    """Module and function ``work(options, *, reporter)``; None for what is no step of a recipe."""
    examples: str = ""
    """Shell lines as ``--help`` shows them, and under each what it is for."""
    next_step: str = ""
    topic: str = ""
    """The topic of `TOPICS` that tells more."""
    json: bool = True
    """Whether it has ``--json``."""


COMMANDS = {
    "data": Command("Make a data set, with its manifest and pairs.", work="datasets.base:data"),
    "embed": Command(
        "Embed images into a feature store; again, to resume or update it.",
        "images.options:EmbedOptions",
        "images.embed:embed",
        """
        ncm embed manifest.csv -o features.h5
            CLIP features of the images that a table with the columns path and
            label names
        ncm embed photos --layout domain/label --model pixels:32 -o features.h5
            the images of a folder, with the names of its folders as columns
        ncm embed manifest.csv --from-array X.npy --encoder-name my-clip \\
            -o features.h5
            features that were made elsewhere, rows in manifest order
        """,
        "ncm pairs, with --features features.h5",
        "images",
    ),
    "pairs": Command(
        "Match rows that differ only in what should not matter.",
        "pairs.options:PairsOptions",
        "pairs.pairs:pairs",
        """
        ncm pairs pairs.csv -f f.h5 -o pairs.h5
            pairs listed by id (columns id_a and id_b)
        ncm pairs --match random --same label --across domain -f f.h5 \\
            -o pairs.h5
            random pairs of one label and two domains
        """,
        "ncm fit --features features.h5 --pairs pairs.h5 -o probe.safetensors",
        "pairs",
    ),
    "fit": Command(
        "Fit a linear probe that ignores what the pairs differ in.",
        "probes.options:FitOptions",
        "probes.fit:fit",
        """
        ncm fit -f features.h5 -p pairs.h5 -o probe.safetensors
            Choose rank and weight decay by validation error + flip rate of pairs,
            cross-fitted.
        ncm fit -f features.h5 -o erm.safetensors
            Without pairs: plain ERM to compare with.
        """,
        "ncm eval probe.safetensors -f features.h5 --where split=test",
        "rank",
    ),
    "zeroshot": Command(
        "Make a probe from prompts: what CLIP says without training.",
        "probes.options:ZeroshotOptions",
        "probes.zeroshot:zeroshot",
        """
        ncm zeroshot -f features.h5 --prompts openai -o zeroshot.safetensors
            a probe of the label's classes, from CLIP's 80 prompts
        ncm zeroshot -f features.h5 --classes 0=landbird,1=waterbird \\
            --pairs pairs.h5 --rank 2 -o robust.safetensors
            without the first two directions that pairs differ in
        ncm zeroshot -f features.h5 --probe probe.safetensors --mix 0.5 \\
            -o mixed.safetensors
            halfway between zero-shot and a fitted probe
        """,
        "ncm eval probe.safetensors --compare zeroshot.safetensors: is a probe better than none?",
        "zeroshot",
    ),
    "eval": Command(
        "Measure a probe: on average, by group, for the worst group.",
        "probes.options:EvalOptions",
        "probes.evaluate:evaluate",
        """
        ncm eval probe.safetensors -f f.h5 --where split=test \\
            --groups label,place
            the test rows, with the worst of the groups label x place
        ncm eval ncm.safetensors -f f.h5 --where split=test \\
            --compare erm.safetensors
            is it better than another probe on the same rows?
        """,
        "ncm bound, for what the test domain can cost; ncm report, for many results in one table",
        "metrics",
    ),
    "bound": Command(
        "Bound a probe's risk in a test domain, term by term.",
        "theory.options:BoundOptions",
        "theory.bound:bound",
        """
        ncm bound probe.safetensors --features F.h5 --oracle-pairs oracle.h5 \\
            --explain
            every term of Theorem 1, with what it means
        ncm bound probe.safetensors --features F.h5 --oracle-pairs oracle.h5 \\
            --pairs P.h5 --ranks 0:40 -o bound.json
            the trade-off along ranks, for ncm report --plots
        """,
        "ncm report bound.json --plots DIR",
        "bound",
    ),
    "predict": Command(
        "Predict images, or the rows of a feature store, with a probe.",
        "probes.options:PredictOptions",
        "probes.predict:predict",
        """
        ncm predict probe.safetensors new-photos/ -o predictions.csv
            every image of a folder, with the encoder that the probe names
        ncm predict probe.safetensors f.h5 --where split=test --probabilities
            rows of a store, to standard output, with the probability of every
            class
        """,
        "ncm eval, where the true answers are known",
        "metrics",
        json=False,
    ),
    "sweep": Command(
        "Train many methods and settings at once; choose by every rule.",
        "baselines.options:SweepOptions",
        "baselines.sweep:sweep",
        """
        ncm sweep -f f.h5 -p pairs.h5 --methods erm,irm,ncm --envs domain \\
            --test split=test -o sweep.h5
            16 random configurations of each method, 5 seeds, all rules side by
            side; for the bound each is also trained on 5 folds
        ncm sweep -f f.h5 -p pairs.h5 --methods ncm --grid --search rank=0:64:8 \\
            --search weight_decay=log:1e-4:1:5 --seeds 1 --folds 0 -o grid.h5
            every combination of nine ranks and five weight decays; no bound, a
            sixth of the time
        """,
        "ncm report sweep.json",
        "methods",
    ),
    "finetune": Command(
        "Train a network end to end, with pairs as a penalty.",
        "finetune.options:FinetuneOptions",
        "finetune.finetune:finetune",
        """
        ncm finetune manifest.csv -p pairs.h5 -o ncm.safetensors
            ResNet-50 with the pairs' representations held together; keeps the
            epoch of the least bound
        ncm finetune manifest.csv --method groupdro --dro-groups label,place \\
            --groups label,place --rule worst-group -o dro.safetensors
            the same network by Group DRO
        """,
        "ncm report ncm.json dro.json --plots figures",
        "finetune",
    ),
    "report": Command(
        "Turn results into tables and plots.",
        "results.options:ReportOptions",
        "results.report:report",
        """
        ncm report runs/colored-digits --plots figures
            everything that a run has found, known values included
        ncm report erm.json ncm.json --format latex -o table.tex
            two evaluations as a booktabs table
        """,
        "look at the figures; ncm run RECIPE compares with published values",
        "metrics",
    ),
    "info": Command(
        "Describe any file of ncm, and whether it is intact.",
        "results.options:InfoOptions",
        None,
        """
        ncm info features.h5
            rows, columns with counts, encoder, failures
        ncm info probe.safetensors --export npz -o probe.npz
            a probe for plain numpy; also sklearn and onnx
        """,
        "ncm info FILE --verify reads every byte back; ncm info --system shows versions.",
        "files",
    ),
    "run": Command(
        "Run a recipe: all of the above in one YAML file.",
        "recipes.options:RunOptions",
        None,
        """
        ncm run recipes/digits.yaml
            everything, into runs/colored-digits
        ncm run recipes/digits.yaml --set seed=[0] --dry-run
            the shell lines for one seed, to read or to paste
        """,
        "run it again after a change: only the steps that the change touches run",
        "recipes",
    ),
    "help": Command(
        "Read about a topic.",
        "commands.help:HelpOptions",
        None,
        """
        ncm help
            the topics, a sentence each
        ncm help pairs
            one of them; through $PAGER if it is longer than the terminal
        """,
        "ncm COMMAND --help, for what a command takes",
        json=False,
    ),
}
"""The commands, in the order in which people meet them."""

BUILDERS = {
    "folder": Command(
        "A manifest with seeded splits over a folder of your own images.",
        "datasets.options:FolderOptions",
        "datasets.image_folder:build",
        """
        ncm data folder photos --layout domain/label -o data
            of each label in each domain, 20 % for the test and 20 % of the rest
            for validation
        ncm data folder photos --layout domain/label --test domain=sketch \\
            -o data
            a whole domain kept for the test
        """,
        "ncm embed data/manifest.csv -o features.h5",
        "start",
    ),
    "digits": Command(
        "Coloured digits: small, and nothing is downloaded.",
        "datasets.options:DigitsOptions",
        "datasets.colored:build_digits",
        """
        ncm data digits -o data
            1,797 digits, 192 pairs, the protocol's defaults
        ncm data digits -o noisy --pairs 256 --wrong-fraction 0.25 --seed 3
            a quarter of the pairs match the wrong digit
        """,
        "ncm embed data/manifest.csv --model pixels:8 -o features.h5",
        "paper",
    ),
    "synthetic": Command(
        "The paper's linear model: stores with oracle, clean and noisy pairs, no images.",
        "datasets.options:SyntheticOptions",
        "datasets.synthetic:build",
        """
        ncm data synthetic -o data
            100 dimensions, 20 of them spurious, 100 pairs
        ncm data synthetic -o data --noise 0,0.1,1 --test-scale 5 --seed 3
            a noisy-LEVEL.h5 for each level of the pairs' noise
        """,
        "ncm fit --features data/features.h5 --pairs data/noisy-0.1.h5 -o probe.safetensors",
        "paper",
    ),
    "colored-mnist": Command(
        "ColoredMNIST by IRM's protocol, from MNIST's own files.",
        "datasets.options:ColoredMnistOptions",
        "datasets.colored:build_colored_mnist",
        """
        ncm data colored-mnist --mnist mnist -o data
            28×28 PNG files, 256 pairs
        ncm data colored-mnist --mnist mnist --size 14 --packed -o data
            one array of pixels, for ncm embed --from-array data/pixels.npy
        """,
        "ncm embed data/manifest.csv -o features.h5",
        "paper",
    ),
    "waterbirds-cf": Command(
        "Waterbirds with counterfactual minority groups, or as it is.",
        "datasets.options:WaterbirdsCfOptions",
        "datasets.waterbirds:build",
        """
        ncm data waterbirds-cf waterbirds --cub CUB_200_2011 --places places365 \\
            -o data
            paste 184 landbirds and 56 waterbirds on the other background
        ncm data waterbirds-cf waterbirds -o data
            a folder that has its counterfactuals (a cf column), or plain
            Waterbirds
        """,
        "ncm embed data/manifest.csv -o features.h5",
        "paper",
    ),
    "pacs": Command(
        "PACS: a manifest with splits over domain/class/file.",
        "datasets.options:PacsOptions",
        "datasets.image_folder:build_pacs",
        """
        ncm data pacs PACS -o data
            80 % training, 20 % validation in each domain
        ncm data pacs PACS --limit 20 -o small
            20 images a class and domain
        """,
        "ncm embed data/manifest.csv -o features.h5",
        "paper",
    ),
}
"""The builders of ``ncm data``: their ``work`` is ``build(options, folder, reporter)``, called by data's."""

TOPICS = {
    "start": "the first ten minutes: your own images to a page",
    "pairs": "how to get pairs, look at them and drop wrong ones",
    "rank": "how to choose r, what fit does, and its verdict",
    "zeroshot": "classifiers and pairs from texts, for features of CLIP",
    "metrics": "what the numbers of eval, predict and report mean; the page",
    "bound": "what a test domain can cost, term by term",
    "methods": "comparing methods, hyper-parameters and selection rules",
    "finetune": "training a network end to end, with pairs",
    "recipes": "the whole path in one YAML file",
    "files": "tables that are read, and the formats of what is written",
    "images": "encoders, image files, archives and buckets, augmentations",
    "api": "commands, files and estimators in Python and notebooks",
    "performance": "how long things take; GPUs, many of them",
    "paper": "results measured, and reproducing the paper",
    "troubleshooting": "what happens when ..., exit codes, when not to use it",
    "contributing": "how the code is laid out, and how to add to it",
    "reference": "every option of every command",
}
"""What ``ncm help NAME`` shows: the file ``help/NAME.md``. In the order in which people need them."""

STEPS = tuple(name for name, command in COMMANDS.items() if command.work)
"""The steps that a recipe may hold."""


def options_of(words: str) -> type:
    """The options class of a command line's first words: ``fit``, ``data digits``."""
    name, _, builder = words.partition(" ")
    made: type = _load((BUILDERS[builder] if builder else COMMANDS[name]).options)
    return made


def work_of(name: str) -> Callable[..., Any]:
    """The function that does a step, ``work(options, *, reporter)``."""
    return _load(COMMANDS[name].work)


def builder_of(options: Any) -> tuple[str, Callable[..., Any]]:
    """The name and the function ``build(options, folder, reporter)`` of the builder with these options."""
    every = BUILDERS.items()
    return next((name, _load(one.work)) for name, one in every if type(options) is _load(one.options))


def _load(address: str | None) -> Any:
    module, _, name = (address or "").partition(":")
    return getattr(importlib.import_module(f"ncm_cli.{module}"), name)
