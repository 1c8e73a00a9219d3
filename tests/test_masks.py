"""Where answers begin and end, by chat templates of many styles, on a tokenizer of single bytes."""

from __future__ import annotations

import pytest
from tiny import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from eyas.data import Sequence
from eyas.errors import InputError
from eyas.masks import ChatTemplate, join

CHATML = (  # the demo target's style: a system message where none is given
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (  # contents are trimmed; nothing stands between turns
    "{{ '<|begin|>' }}{% for message in messages %}{{ '<|start|>' + message['role'] + '<|end|>\n\n' "
    "+ message['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
GEMMA = (  # another name for the assistant, no system role
    "{{ '<bos>' }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MARKED = (  # the marks leave the end token out, which belongs to the answer all the same
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = (  # what was thought vanishes as soon as another question follows
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and not loop.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHOUTING = CHATML.replace(  # an earlier answer of another text, as long as it was
    "message['content']",
    "(message['content'] | upper if message['role'] == 'assistant' and not loop.last else message['content'])",
)
COUNTING = "{{ messages | length }}" + CHATML  # the beginning depends on what follows
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|begin|>", "<|start|>", "<|end|>", "<|eot|>",
    "<bos>", "<start_of_turn>", "<end_of_turn>",
]  # fmt: skip
ENDS = ("<|im_end|>", "<|eot|>", "<end_of_turn>")

TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo!"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "No"},
]


def template(text: str | None, tokenizer: PreTrainedTokenizerBase | None = None) -> ChatTemplate:
    tokenizer = tokenizer or tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = text
    return ChatTemplate(tokenizer, [int(i) for i in tokenizer.convert_tokens_to_ids(list(ENDS))])


def spans(chat: ChatTemplate, sequence: Sequence) -> list[str]:
    return [chat.whole_text(sequence.tokens[start:end]) for start, end in sequence.spans]


@pytest.mark.parametrize(
    ("text", "end"), [(CHATML, "<|im_end|>"), (LLAMA3, "<|eot|>"), (GEMMA, "<end_of_turn>"), (MARKED, "<|im_end|>")]
)
def test_an_answer_is_its_text_and_its_end_token(text: str, end: str) -> None:
    chat = template(text)
    (sequence,) = chat.answered(TALK)
    assert spans(chat, sequence) == [f"Yo!{end}", f"No{end}"]
    assert chat.whole_text(sequence.tokens).endswith(f"No{end}"), "nothing stands after the last answer"
    assert sequence.tokens[: sequence.spans[0][0]] == tuple(chat.prompt(TALK[:1])), "as it is asked when decoding"
    assert sequence.tokens[: sequence.spans[1][0]] == tuple(chat.prompt(TALK[:3]))
    assert chat.tokenizer.convert_ids_to_tokens(chat.end_of_turn()) == end


def test_places_by_hand() -> None:
    """LLAMA3, one token a byte: <|begin|> <|start|> u s e r <|end|> \\n \\n H i <|eot|> are 12 tokens."""
    (sequence,) = template(LLAMA3).answered(TALK)
    header = 1 + len("assistant") + 1 + 2
    first = 12 + header
    second = first + 4 + (1 + 4 + 1 + 2 + 4 + 1) + header
    assert sequence.spans == ((first, first + 4), (second, second + 3))
    assert len(sequence.tokens) == second + 3


def test_the_file_may_end_with_a_question() -> None:
    chat = template(CHATML)
    assert chat.answered(TALK[:3]) == chat.answered(TALK[:2])
    with pytest.raises(InputError, match="no answer"):
        chat.answered(TALK[:1])


def test_marks_are_cut_to_what_the_target_writes() -> None:
    """Marks around the header that the generation prompt writes, and around what follows the end token."""
    wide = MARKED.replace("{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}", "")
    wide = (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}"
        "{{ '<|im_start|>assistant\n' + message['content'] + '<|im_end|>\n' }}{% endgeneration %}"
        "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    chat = template(wide)
    (sequence,) = chat.answered(TALK)
    assert spans(chat, sequence) == ["Yo!<|im_end|>", "No<|im_end|>"]


def test_rewritten_history_gives_a_sequence_for_each_turn() -> None:
    chat = template(THINKING)
    talk = [dict(message) for message in TALK]
    talk[1]["content"] = "<think>Hm</think>\n\nYo!"
    first, second = chat.answered(talk)
    assert spans(chat, first) == ["<think>Hm</think>\n\nYo!<|im_end|>"]
    assert spans(chat, second) == ["No<|im_end|>"], "the first answer is context here, and not trained twice"
    assert "<think>" not in chat.whole_text(second.tokens)
    (whole,) = chat.answered(TALK)
    assert len(whole.spans) == 2, "nothing thought, nothing rewritten"


def test_what_no_template_says_is_refused() -> None:
    def message(text: str | None, talk: list[dict[str, str]] = TALK) -> str:
        with pytest.raises(InputError) as refused:
            template(text).answered(talk)
        return str(refused.value)

    assert "unstable: with the answer it writes '2<|im_start|>" in message(COUNTING)
    assert "100 %" in message("{% generation %}" + CHATML + "{% endgeneration %}")
    assert "0 %" in message(CHATML + "{% if false %}{% generation %}{% endgeneration %}{% endif %}")
    silent = CHATML.replace("message['content']", "(message['content'] if message['role'] == 'user' else '')")
    assert "0 %" in message(silent)
    assert "no prompt: 100 %" in message("{% if not add_generation_prompt %}" + CHATML + "{% endif %}")
    assert "none of the target's end tokens" in message(CHATML.replace("<|im_end|>", "<|end|>"))
    assert "in several pieces" in message(
        MARKED.replace("{% endgeneration %}", "{% endgeneration %}|{% generation %}{{ 'x' }}{% endgeneration %}")
    )
    assert "System role not supported" in message(GEMMA, [{"role": "system", "content": "s"}, *TALK])
    assert "no chat template" in message(None)


def test_a_token_over_the_border_is_refused() -> None:
    """Two line ends are one token here: an answer that begins with one would share it with its prompt."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["</s>", *alphabet, "ĊĊ"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    chat = template(CHATML, PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"))
    assert len(chat.answered(TALK)) == 1
    with pytest.raises(InputError, match="a token holds both"):
        chat.answered([TALK[0], {"role": "assistant", "content": "\nYo"}])


@pytest.mark.parametrize(("text", "kept"), [(CHATML, True), (LLAMA3, False), (THINKING, True), (SHOUTING, False)])
def test_sampled_tokens_stay_as_they_were(text: str, kept: bool) -> None:
    """` Yo!` keeps its own tokens where the template keeps its text: LLAMA3 trims the blank, and is rendered anew."""
    chat = template(text)
    talk = [TALK[0], {"role": "assistant", "content": " Yo!"}, TALK[2]]
    odd = [77, 78]  # ids that no tokenizer gives for this text
    asked = [*chat.prompt(talk[:1]), *odd, chat.end_of_turn()]
    tokens = chat.next_prompt(asked, talk)
    assert (tokens[: len(asked)] == asked) == kept
    anew = chat.prompt(talk)
    header = "<|start|>user" if text == LLAMA3 else "\n<|im_start|>user"
    follow = chat.encode(chat.whole_text(anew).rpartition(header)[1] + chat.whole_text(anew).rpartition(header)[2])
    assert tokens == ([*asked, *follow] if kept else anew)


def test_an_answer_that_another_token_ended_is_rendered_anew() -> None:
    chat = template(CHATML)
    talk = TALK[:3]
    asked = [*chat.prompt(talk[:1]), *chat.encode("Yo!"), chat.eos_ids[1]]
    assert chat.next_prompt(asked, talk) == chat.prompt(talk)


def test_join() -> None:
    sequences: list[Sequence] = []
    join(sequences, [1, 2, 3, 4], (2, 4))
    join(sequences, [1, 2, 3, 4, 5, 6], (5, 6))
    assert sequences == [Sequence((1, 2, 3, 4, 5, 6), ((2, 4), (5, 6)))]
    join(sequences, [1, 2, 9, 4, 5, 6, 7, 8], (7, 8))
    assert sequences[1:] == [Sequence((1, 2, 9, 4, 5, 6, 7, 8), ((7, 8),))]


def test_texts_for_people_move_no_terminal() -> None:
    chat = template(CHATML)
    assert chat.whole_text(chat.encode("a\x1b[2J\nb<|im_end|>")) == "a\\x1b[2J\nb<|im_end|>"


def test_without_a_template_a_text_is_a_prompt() -> None:
    chat = template(None)
    assert chat.prompt(TALK[:1]) == chat.tokenizer.encode("Hi")
    with pytest.raises(InputError, match="no chat template"):
        chat.prompt(TALK[:3])
