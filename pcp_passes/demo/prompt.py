# SPDX-License-Identifier: Apache-2.0
"""A long prompt of real text that every Python brings along: its own language reference (PSF licence), read here.

The text differs a little between Python versions, hence so do the tokens; the length stays close to what is asked.
"""

from __future__ import annotations

from typing import Any

from pcp_passes.errors import ConfigError

# On one subject, so that the question at the end is about all of it.
TOPICS = ("with", "context-managers", "try", "exceptions", "raise", "assert", "for", "while", "function", "class")
INTRODUCTION = "Here is a part of the reference manual of the Python programming language.\n\n"
QUESTION = (
    "\n\nThat was the manual. Now answer in a few plain sentences for a beginner: what does the `with` statement do, "
    "and what happens to an exception that is raised inside of it?"
)


def reference_prompt(tokenizer: Any, tokens: int = 3500) -> list[int]:
    """Token ids of a chat turn with ``tokens`` tokens of manual and question, less what a cut between paragraphs costs.

    Args:
        tokenizer: of transformers, with a chat template.
        tokens: upper bound; the result is at most a paragraph (about 200 tokens) shorter.

    Raises:
        ConfigError: ``tokens`` is too small for the question, or larger than the text at hand.
    """
    paragraphs = [paragraph for topic in TOPICS for paragraph in _topic(topic).split("\n\n")]
    # Fewest paragraphs that are too many, found by bisection: the template and merges make lengths not quite additive.
    low, high = 0, len(paragraphs) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if len(_render(tokenizer, paragraphs[:middle])) <= tokens:
            low = middle
        else:
            high = middle
    found = _render(tokenizer, paragraphs[:low])
    if low in (0, len(paragraphs)):
        raise ConfigError(
            f"no prompt of {tokens} tokens: the question alone has {len(_render(tokenizer, []))}, the whole text has "
            f"{len(_render(tokenizer, paragraphs))}. Ask for a length between them."
        )
    return found


def _topic(name: str) -> str:
    # Some systems package it apart from the rest of the standard library.
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError(
            "the prompt is made from pydoc_data, a part of Python that this installation leaves out. "
            "Next: install the full standard library of Python"
        ) from error
    return topics[name].strip()


def _render(tokenizer: Any, paragraphs: list[str]) -> list[int]:
    content = INTRODUCTION + "\n\n".join(paragraphs) + QUESTION
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=True
    )
    return list(chat["input_ids"])
