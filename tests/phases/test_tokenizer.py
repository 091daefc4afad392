import pytest
import torch

from residency.offload.errors import InputError
from residency.phases.diffusers.families import (
    StubProcessor,
    StubTokenizer,
    TokenizerSpec,
    families,
    find_family,
)

T5 = TokenizerSpec(vocabulary=1000, end_token=1, model_max_length=512)
QWEN = TokenizerSpec(vocabulary=1000, template_tokens=34, model_max_length=4096)
QWEN_VL = TokenizerSpec(
    kind="processor",
    vocabulary=1000,
    template_tokens=20,
    image_token=1005,
    model_max_length=4096,
)


def tokens_in(encoding):
    return encoding.attention_mask.sum(dim=1).tolist()


def test_a_text_has_as_many_tokens_as_the_stub_is_told():
    stub = T5.stub()
    for tokens in (1, 40, 512):
        stub.tokens = tokens
        assert tokens_in(stub("whatever it says", padding=True)) == [tokens]


def test_the_template_adds_its_tokens():
    stub = QWEN.stub()
    stub.tokens = 100
    encoding = stub(["a", "b"], padding=True, max_length=1058, truncation=True)
    assert encoding.input_ids.shape == (2, 134)


def test_padding_to_the_maximum_masks_what_is_padded():
    stub = T5.stub()
    stub.tokens = 10
    encoding = stub("a", padding="max_length", max_length=64)
    assert encoding.input_ids.shape == (1, 64)
    assert tokens_in(encoding) == [10]
    assert encoding.input_ids[0, 10:].count_nonzero() == 0


def test_a_text_is_cut_to_the_maximum_asked_for_or_else_to_the_model_s():
    stub = T5.stub()
    stub.tokens = 2000
    assert tokens_in(stub("a", padding="longest")) == [512]
    assert tokens_in(stub("a", padding="max_length", max_length=77)) == [77]
    assert tokens_in(stub("a", padding="max_length", max_length=600)) == [600]


def test_ids_depend_on_the_text_alone():
    stub = T5.stub()
    first, again, other = (stub(text).input_ids for text in ("a cat", "a cat", "a dog"))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_ids_are_plain_words_of_the_vocabulary_and_the_last_one_ends():
    ids = T5.stub()("a cat").input_ids[0]
    assert ids[-1] == T5.end_token
    assert 3 <= ids[:-1].min() <= ids[:-1].max() < 1000


def test_an_encoding_moves_like_the_real_one():
    assert T5.stub()("a cat").to("meta").input_ids.device.type == "meta"


def test_a_processor_tells_its_template_and_its_image_token():
    stub = QWEN_VL.stub()
    assert isinstance(stub, StubProcessor)
    assert stub.tokenizer.encode("<|image_pad|>") == [1005]
    template = stub.apply_chat_template([{"role": "system"}], tokenize=True, return_dict=False)
    assert len(template[0]) == 20


def test_a_processor_reads_text_only():
    stub = QWEN_VL.stub()
    stub.tokens = 7
    encoding = stub(text=["a"], padding=True, padding_side="left", return_tensors="pt")
    assert tokens_in(encoding) == [27]
    assert encoding.mm_token_type_ids.shape == (1, 27)
    with pytest.raises(InputError, match="reads no images"):
        stub(text=["a"], images=[object()])


@pytest.mark.parametrize("name", families())
def test_a_pipeline_holds_its_stubs_as_components(name):
    family = find_family(name, tiny=True)
    components = family.build().components
    for tokenizer in family.tokenizers:
        assert isinstance(components[tokenizer], StubTokenizer)
