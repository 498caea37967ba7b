"""A tokenizer that kills its process. It imports little: worker processes import it too."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchspec.config.schema import TEMPLATE_DATE
from batchspec.text.chat_templates import ChatTemplates


class KillingTokenizer:
    """A token a byte. Ends its process at the text `... die`, and at `FILE die once` while there is no such file."""

    eos_ids: tuple[int, ...] = (257,)
    special_ids: Mapping[str, int] = {}
    added_ids = special_ids
    fingerprint = "kills"
    has_chat_template = False
    chats = ChatTemplates({}, {}, "a stand-in", date=TEMPLATE_DATE)

    def encode(self, text: str, **_: Any) -> list[int]:
        if text.endswith("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if text.endswith("die once") and not (mark := Path(text.split()[0])).exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return list(text.encode())
