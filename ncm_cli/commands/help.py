"""``ncm help``: the topics, and each as a page of Markdown."""

from __future__ import annotations

import dataclasses
import re

from ncm_cli.console import Ui
from ncm_cli.errors import UsageError, unknown
from ncm_cli.options import argument
from ncm_cli.registry import COMMANDS, TOPICS, topic_text


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HelpOptions:
    """The topic."""

    topic: str | None = argument(
        None, help="What to read about; without it, all topics are listed.", names="registry:TOPICS"
    )


def run(options: HelpOptions, ui: Ui) -> None:
    """List the topics, or show one."""
    if options.topic is None:
        width = max(map(len, TOPICS))
        ui.text("\n".join(f"{name:{width}}  {sentence}" for name, sentence in TOPICS.items()))
        ui.text("\nncm help TOPIC shows one; ncm COMMAND --help shows a command's options.")
    elif options.topic not in TOPICS:
        raise unknown("topic", options.topic, [*TOPICS, *(COMMANDS.keys() - TOPICS)], error=UsageError)
    else:
        ui.markdown(topic_page(options.topic))


def topic_page(topic: str) -> str:
    """A topic's Markdown, with links to other topics as ``ncm help`` commands."""
    text = re.sub(r"^<!-- .*? -->\n", "", topic_text(topic), flags=re.MULTILINE)
    return re.sub(r"\[([^]]+)\]\((\w+)\.md(?:#[^)]*)?\)", r"\1 (`ncm help \2`)", text)
