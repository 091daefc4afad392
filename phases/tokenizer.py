"""Stand-ins for the tokenizers and processors of pipelines that are built without any files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self
from zlib import crc32

from pydantic import BaseModel, ConfigDict

from ..offload.errors import InputError

if TYPE_CHECKING:
    from transformers import BatchEncoding

_FIRST_ID = 3  # below stand padding, end and unknown in every vocabulary here


class TokenizerSpec(BaseModel):
    """What a pipeline config says of one tokenizer or processor."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["tokenizer", "processor"] = "tokenizer"
    vocabulary: int
    """Ids handed out are below this one; special ids lie at or above it."""
    model_max_length: int
    template_tokens: int = 0
    """Tokens that the pipeline's prompt template adds in front of every prompt."""
    end_token: int | None = None
    image_token: int | None = None

    def stub(self) -> StubTokenizer:
        return StubProcessor(self) if self.kind == "processor" else StubTokenizer(self)


class StubTokenizer:
    """Takes every text to be `tokens` tokens long, whatever it says.

    The ids depend on the text alone, so that a negative prompt reads differently from a prompt.
    The length, with the template's tokens, is cut to `max_length`, or without one to
    `model_max_length`.
    """

    padding_side = "right"

    def __init__(self, spec: TokenizerSpec, *, tokens: int = 512) -> None:
        self.spec = spec
        self.tokens = tokens

    @property
    def model_max_length(self) -> int:
        return self.spec.model_max_length

    @property
    def added_tokens_encoder(self) -> dict[str, int]:
        return {}

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        padding: bool | str = False,
        max_length: int | None = None,
        **_: object,
    ) -> BatchEncoding:
        import torch
        from transformers import BatchEncoding

        longest = max_length or self.model_max_length
        length = min(self.tokens + self.spec.template_tokens, longest)
        padded = longest if padding == "max_length" else length
        texts = [text] if isinstance(text, str) else text
        ids = torch.zeros(len(texts), padded, dtype=torch.long)
        for row, each in zip(ids, texts, strict=True):
            row[:length] = torch.tensor(self._ids(each, length))
        mask = torch.zeros_like(ids)
        mask[:, :length] = 1
        return BatchEncoding({"input_ids": ids, "attention_mask": mask})

    def tokenize(self, text: str) -> list[str]:
        return text.split()

    def batch_decode(self, rows: Sequence[object], **_: object) -> list[str]:
        return ["" for _ in rows]

    def _ids(self, text: str, length: int) -> list[int]:
        usable = self.spec.vocabulary - _FIRST_ID
        start = crc32(text.encode())
        ids = [_FIRST_ID + (start + 31 * position) % usable for position in range(length)]
        if self.spec.end_token is not None:
            ids[-1] = self.spec.end_token
        return ids


class StubProcessor(StubTokenizer):
    """A vision-language processor that reads text only."""

    @property
    def tokenizer(self) -> Self:
        return self

    def __call__(self, text: str | Sequence[str], **options: Any) -> BatchEncoding:
        import torch

        if options.pop("images", None) is not None:
            raise InputError(
                "a stub processor reads no images", hint="build the pipeline from its real files"
            )
        encoding = super().__call__(text, **options)
        encoding["mm_token_type_ids"] = torch.zeros_like(encoding["input_ids"])
        return encoding

    def encode(self, text: str) -> list[int]:
        """The ids of a special token's text: the only use that pipelines make of it."""
        token = self.spec.image_token
        return self._ids(text, 1) if token is None else [token]

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, object]], **_: object
    ) -> list[list[int]]:
        """One row of as many ids as the template takes."""
        return [self._ids(str(messages), self.spec.template_tokens)]
