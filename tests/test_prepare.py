"""`eyas prepare`: what is read, what is answered, what a folder keeps, and what an endpoint may do."""

from __future__ import annotations

import errno
import gzip
import json
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from tiny import tiny_target, tiny_tokenizer

from eyas import prepared
from eyas.checkpoint import load_outline, load_target, target_fingerprint
from eyas.cli import main
from eyas.commands.prepare import shown
from eyas.conversations import Conversation, Turn, parse, read_conversations
from eyas.data import Sequence
from eyas.endpoint import Endpoint, EndpointError
from eyas.errors import InputError
from eyas.masks import ChatTemplate
from eyas.model import Model
from eyas.policies import Chain
from eyas.prepare import Asked, Kept, Sampled, Settings, prepare
from eyas.prepared import Answered, Figures, Folder, read_header, read_prepared

SETTINGS = Settings((0.0, 0.9), max_new_tokens=14, seed=5)
MADE_FOR = {"weights": "w", "tokenizer": "t", "chat_template": "c"}


@pytest.fixture(scope="module")
def model() -> Model:
    """Random, but often done with its answer: the end token's row is long."""
    target = tiny_target(vocab=260)
    with torch.no_grad():
        target.head_VD[2] *= 4
    return Model(target, tiny_tokenizer(), None, Chain(1))


def talk(*users: str, system: str | None = None) -> Conversation:
    return Conversation("here", 1, "1", system, tuple(Turn(user) for user in users))


TALKS = [talk("Hi", "And?", "So?"), talk("Why", system="Be kind"), *(talk(f"No {i}", "More") for i in range(9))]


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def everything(folder: Path) -> list[Sequence]:
    return list(read_prepared(folder, sys.maxsize, sys.maxsize))


# -- reading -----------------------------------------------------------------------------------------------------------

MESSAGES = {"messages": [
    {"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]}  # fmt: skip
SHAREGPT = {"id": "x", "conversations": [
    {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}
]}  # fmt: skip


def test_the_forms_of_conversations(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", MESSAGES, SHAREGPT, {"turns": ["a", "c"], "question_id": 7})
    path.write_text(path.read_text().replace("\n", "\n\n", 1))  # an empty line counts as a line
    first, second, third = read_conversations(path)
    assert first == Conversation(f"{path}, line 1", 1, "1", "s", (Turn("a", "b"), Turn("c")))
    assert second == Conversation(f"{path}, line 3", 3, "x", None, (Turn("a", "b"), Turn("c")))
    assert third == Conversation(f"{path}, line 4", 4, "7", None, (Turn("a"), Turn("c")))
    assert first.messages(first.turns[:1]) == MESSAGES["messages"]
    assert third.messages([]) == [{"role": "user", "content": "a"}]
    thought = {"role": "assistant", "content": "b", "reasoning_content": "r"}
    (turn,) = parse({"messages": [MESSAGES["messages"][1], thought]}, "w", 1).turns
    assert turn == Turn("a", "b", "r")
    assert third.messages([turn])[1] == thought


def test_files_and_folders(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "lines.jsonl", MESSAGES, SHAREGPT)
    expected = [conversation.turns for conversation in read_conversations(lines)]
    with gzip.open(tmp_path / "packed.jsonl.gz", "wt") as file:
        file.write(lines.read_text())
    (tmp_path / "array.json").write_text(json.dumps([MESSAGES, SHAREGPT]))
    for name in ("packed.jsonl.gz", "array.json"):
        assert [conversation.turns for conversation in read_conversations(tmp_path / name)] == expected
    (tmp_path / "set").mkdir()
    lines.rename(tmp_path / "set" / "b.jsonl")
    (tmp_path / "set" / "a.txt").write_text("one\n\ntwo\r\n")
    (tmp_path / "set" / "README.md").write_text("no prompts\n")
    found = list(read_conversations(tmp_path / "set"))
    assert [(c.turns[0].user, c.line) for c in found] == [("one", 1), ("two", 3), ("a", 1), ("a", 2)]
    assert list(read_conversations(tmp_path / "set", 3)) == found[:3]


USER, GPT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
WRONG = {
    "no JSON": "{",
    "one list of messages, turns, conversations": {"prompt": "a"},
    "one list of messages": {"messages": [USER], "turns": ["a"]},
    "turns must hold": {"turns": []},
    "needs a user's turn": {"messages": [{"role": "system", "content": "s"}]},
    "message 1 is of the assistant, expected the user": {"messages": [GPT, USER]},
    "message 2 is of the user, expected the assistant": {"messages": [USER, USER]},
    "message 3 is of the system": {"messages": [USER, GPT, {"role": "system", "content": "s"}]},
    "role must be one of": {"messages": [{"role": "tool", "content": "a"}]},
    "from must be one of": {"conversations": [USER]},
    "expected objects with role": {"messages": ["a"]},
    "something in it, got '  '": {"turns": ["a", "  "]},
    "something in it, got None": {"messages": [{"role": "user", "content": None}]},
    "tools": {"messages": [USER, {**GPT, "tool_calls": [1]}]},
    "surrogate": {"turns": ["\ud800"]},
}


@pytest.mark.parametrize("words", WRONG)
def test_a_malformed_line_is_named(tmp_path: Path, words: str) -> None:
    wrong = WRONG[words]
    text = wrong if isinstance(wrong, str) else json.dumps(wrong)
    (tmp_path / "a.jsonl").write_text(json.dumps(MESSAGES) + "\n" + text + "\n")
    with pytest.raises(InputError, match="line 2") as refused:
        list(read_conversations(tmp_path / "a.jsonl"))
    assert words in str(refused.value)
    assert len(list(read_conversations(tmp_path / "a.jsonl", 1))) == 1


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"hello " * 99)[:-9])
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "object.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for name in ("cut.txt.gz", "latin.txt", "object.json", "empty", "missing"):
        with pytest.raises(InputError, match=name):
            list(read_conversations(tmp_path / name))


def test_tables_need_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "part.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install 'eyas\[datasets\]'"):
        list(read_conversations(tmp_path))


def test_data_sets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([SHAREGPT, {**SHAREGPT, "id": "y"}])
    table.save_to_disk(str(tmp_path / "one"))
    other = datasets.Dataset.from_list([{"id": "z", "turns": ["a"]}])
    datasets.DatasetDict({"test": other, "train": table}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "parquet").mkdir()
    table.to_parquet(str(tmp_path / "parquet" / "a.parquet"))
    for name in ("one", "splits", "parquet"):
        found = list(read_conversations(tmp_path / name))
        assert [(c.id, c.line, c.turns) for c in found] == [
            ("x", 1, (Turn("a", "b"), Turn("c"))), ("y", 2, (Turn("a", "b"), Turn("c")))
        ]  # fmt: skip
    datasets.DatasetDict({"a": table, "b": table}).save_to_disk(str(tmp_path / "names"))
    with pytest.raises(InputError, match="splits a, b"):
        list(read_conversations(tmp_path / "names"))


# -- sampling ----------------------------------------------------------------------------------------------------------


def one_by_one(model: Model, number: int) -> tuple[list[tuple[list[int], int]], list[str], bool]:
    """Slow twin: a conversation's turns as single answers. For each, the tokens up to its end and where it begins; how
    they ended; is something left to ask?"""
    chat, conversation = ChatTemplate(model.tokenizer, (2,)), TALKS[number]
    settings = {"max_new_tokens": 14, "temperature": SETTINGS.temperature(number), "seed": 5, "sample": number}
    turns: list[Turn] = []
    answers: list[tuple[list[int], int]] = []
    reasons = []
    for turn in conversation.turns:
        messages = conversation.messages(turns)
        prompt = chat.next_prompt(answers[-1][0], messages) if turns else chat.prompt(messages)
        output = model.generate(prompt, **settings)
        answers.append(([*prompt, *output.token_ids], len(prompt)))
        reasons.append(output.finish_reason)
        turns.append(Turn(turn.user, model.decode(output.token_ids)))
        if output.finish_reason == "length":
            break
    return answers, reasons, len(turns) < len(conversation.turns)


@pytest.mark.parametrize("slots", [1, 4])
def test_sampled_conversations_are_single_answers(model: Model, tmp_path: Path, slots: int) -> None:
    result = prepare(TALKS, Sampled(model, SETTINGS, slots), MADE_FOR, tmp_path / "out", shard=4)
    found = {a.number: a for s in range(3) for a in prepared._read(tmp_path / "out" / prepared._name(s))}
    assert sorted(found) == list(range(len(TALKS)))
    turns_seen, joined = set(), 0
    for number, answered in found.items():
        answers, reasons, cut = one_by_one(model, number)
        turns_seen.add(len(answers))
        joined += len(answers) - len(answered.sequences)
        assert [(list(s.tokens[:end]), start) for s in answered.sequences for start, end in s.spans] == answers
        assert (answered.finishes[-1], answered.cut) == (reasons[-1], cut)
        assert answered.temperature == (0.0, 0.9)[number % 2]
    assert len(turns_seen) > 1 and joined, "some conversations go on in their sequence, some are cut"
    assert result.whole == result.new == Figures.of(list(found.values()))
    assert result.whole.conversations == len(TALKS)
    assert result.whole.stop + result.whole.length == result.whole.sequences


def test_figures_by_hand() -> None:
    two = Sequence((1, 2, 3, 4, 5, 6), ((1, 3), (5, 6)))
    answered = [Answered(0, 1, 0.0, (two,), ("stop",), True), Answered(1, 2, 0.8, (), (), True)]
    assert Figures.of(answered) == Figures(2, 1, 3, 3, stop=1, cut=2)
    assert Figures.of(answered) + Figures.of(answered) == Figures(4, 2, 6, 6, stop=2, cut=4)


def test_a_prompt_that_fills_the_context_is_left_out(model: Model, tmp_path: Path) -> None:
    chat = ChatTemplate(model.tokenizer, (2,))
    room = 256 - len(chat.prompt([{"role": "user", "content": ""}]))  # the last token of the context is an answer's
    talks = [talk("x" * room), talk("x" * (room - 1)), talk("Hi"), talk("No 3", "x" * 300)]
    settings = Settings((0.9,), 14, seed=1)
    result = prepare(talks, Sampled(model, settings, 2), MADE_FOR, tmp_path)
    assert (result.whole.conversations, result.whole.sequences, result.whole.cut) == (4, 3, 2)


def test_answers_are_kept_and_cut_at_a_turn(model: Model, tmp_path: Path) -> None:
    chat = ChatTemplate(model.tokenizer, (2,))
    turns = (Turn("Hi", "Yo"), Turn("And", "No"), Turn("So"))
    talks = [Conversation("here", 4, "4", None, turns), Conversation("there", 5, "5", None, turns[:1])]
    (whole,) = chat.answered(talks[0].messages(turns[:2]))
    for length, spans in ((len(whole.tokens), 2), (len(whole.tokens) - 1, 1)):
        result = prepare(talks, Kept(chat, length), MADE_FOR, tmp_path / str(length))
        first, second = everything(tmp_path / str(length))
        assert first == Sequence(whole.tokens[: whole.spans[spans - 1][1]], whole.spans[:spans])
        assert second == Sequence(first.tokens[: first.spans[0][1]], first.spans[:1])
        assert (result.whole.given, result.whole.cut) == (2, 2 - spans)
    result = prepare(talks, Kept(chat, 5), MADE_FOR, tmp_path / "none")
    assert (result.whole.sequences, result.whole.cut, everything(tmp_path / "none")) == (0, 2, [])
    with pytest.raises(InputError, match="here: the conversation has no assistant's turn"):
        prepare([talk("Hi")], Kept(chat, 99), MADE_FOR, tmp_path / "refused")
    assert not (tmp_path / "refused").exists(), "nothing is written before every line has been looked at"


# -- the folder --------------------------------------------------------------------------------------------------------


class Dying:
    """A source that ends after some answers."""

    def __init__(self, source: Sampled, answers: int, error: BaseException) -> None:
        self.source, self.left, self.error = source, answers, error
        self.template, self.settings = source.template, source.settings
        self.asked: list[int] = []

    def check(self, conversation: Conversation) -> None:
        self.source.check(conversation)

    def answers(self, conversations: Iterable[tuple[int, Conversation]]) -> Iterator[Answered]:
        def noted() -> Iterator[tuple[int, Conversation]]:
            for number, conversation in conversations:
                self.asked.append(number)
                yield number, conversation

        for answered in self.source.answers(noted()):
            if not self.left:
                raise self.error
            self.left -= 1
            yield answered


@pytest.fixture(scope="module")
def whole(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that was made at one go, three shards."""
    path = tmp_path_factory.mktemp("whole")
    prepare(TALKS, Sampled(model, SETTINGS, 2), MADE_FOR, path, shard=4)
    return path


@pytest.mark.parametrize("answers", [0, 3, 4, 7, 10])
@pytest.mark.parametrize("killed", [False, True])
def test_an_interrupted_run_goes_on(
    model: Model, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: int, killed: bool
) -> None:
    """Ctrl-C keeps every answer that was finished, `kill -9` every full shard; the end is the same to the byte."""
    with monkeypatch.context() as patch:
        if killed:  # whatever would run at the end of the process does not
            patch.setattr(Folder, "close", lambda self: None)
        with pytest.raises(KeyboardInterrupt):
            prepare(TALKS, Dying(Sampled(model, SETTINGS, 2), answers, KeyboardInterrupt()), MADE_FOR, tmp_path, 4)
    full = 4 * len([path for path in tmp_path.glob("answers-*.safetensors")])
    (tmp_path / "answers-00002.safetensors.tmp").write_bytes(b"half a file")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "header.json.tmp").write_bytes(b"half a header")
    Folder(tmp_path / "new", {"conversations": 1, "shard": 1})
    shutil.rmtree(tmp_path / "new")
    with pytest.raises(InputError, match="missing"):
        everything(tmp_path)
    second = Dying(Sampled(model, SETTINGS, 2), 99, KeyboardInterrupt())
    result = prepare(TALKS, second, MADE_FOR, tmp_path, shard=4)
    assert len(second.asked) == len(TALKS) - (full if killed else answers)
    assert result.new.conversations == len(second.asked)
    assert result.whole.conversations == len(TALKS)
    assert contents(tmp_path) == contents(whole)


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "gone", "no record", "another's record", "broken record"])
def test_a_corrupt_shard_is_found_and_made_anew(model: Model, whole: Path, tmp_path: Path, harm: str) -> None:
    for name, data in contents(whole).items():
        (tmp_path / name).write_bytes(data)
    shard, record = tmp_path / "answers-00001.safetensors", tmp_path / "answers-00001.json"
    data = shard.read_bytes()
    if harm == "flip":
        shard.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    elif harm in ("cut", "empty"):
        shard.write_bytes(data[:-1] if harm == "cut" else b"")
    elif harm == "gone":
        shard.unlink()
    elif harm == "no record":
        record.unlink()
    else:
        record.write_bytes((tmp_path / "answers-00000.json").read_bytes() if harm == "another's record" else b"[")
    with pytest.raises(InputError, match="answers-00001.*(broken|missing)"):
        everything(tmp_path)
    (tmp_path / "open.safetensors").write_bytes(data[:99])
    again = Dying(Sampled(model, SETTINGS, 2), 99, KeyboardInterrupt())
    result = prepare(TALKS, again, MADE_FOR, tmp_path, shard=4)
    assert again.asked == [4, 5, 6, 7]
    assert result.redone == ["open.safetensors", *([] if harm == "gone" else ["answers-00001.safetensors"])]
    assert contents(tmp_path) == contents(whole)


def test_a_folder_of_something_else_is_refused(model: Model, whole: Path, tmp_path: Path) -> None:
    before = contents(whole)

    def refused(words: str, path: Path = whole, talks: list[Conversation] = TALKS, made_for: dict = MADE_FOR,
                settings: Settings = SETTINGS) -> None:  # fmt: skip
        with pytest.raises(InputError, match=words):
            prepare(talks, Sampled(model, settings, 2), made_for, path, shard=4)

    refused("weights was 'w', and is 'v' now", made_for={**MADE_FOR, "weights": "v"})
    refused("tokenizer was", made_for={**MADE_FOR, "tokenizer": "v"})
    refused(r"temperatures was \[0.0, 0.9\], and is \[0.0\]", settings=Settings((0.0,), 14, 5))
    refused("seed was 5", settings=Settings((0.0, 0.9), 14, 6))
    refused("prompts was", talks=[*TALKS[1:], TALKS[0]])
    assert contents(whole) == before
    (tmp_path / "thesis.txt").write_text("mine")
    refused("not empty", path=tmp_path)
    for text in ("{", "[]", '{"format": 2, "conversations": 1, "shard": 1}', '{"format": 1, "conversations": 1}'):
        (tmp_path / "header.json").write_text(text)
        refused("no folder that eyas prepare has written", path=tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_reading_a_folder(whole: Path) -> None:
    sequences = everything(whole)
    assert list(read_prepared(whole, 260, 9999, limit=3)) == sequences[:3]
    assert read_header(whole)["target"] == MADE_FOR
    longest = max(sequences, key=lambda s: len(s.tokens))
    for length in (len(longest.tokens), len(longest.tokens) - 1, longest.spans[-1][0], longest.spans[0][0] + 1):
        for cut in read_prepared(whole, 260, length):
            (own,) = {s for s in sequences if s.tokens[:length] == cut.tokens}
            assert len(cut.tokens) == min(length, len(own.tokens))
            inside = [t for start, end in own.spans for t in range(start, end) if t < length]
            assert [t for start, end in cut.spans for t in range(start, end)] == inside
            assert all(start < end for start, end in cut.spans)
    with pytest.raises(InputError, match="outside the target's vocabulary of 50"):
        list(read_prepared(whole, 50, 9999))
    assert list(read_prepared(whole, 260, 9999, made_for={**MADE_FOR, "dtype": "int8"})) == sequences
    for key in MADE_FOR:
        with pytest.raises(InputError, match=f"another {key.replace('_', ' ')}"):
            list(read_prepared(whole, 260, 9999, made_for={**MADE_FOR, key: "other"}))


# -- the endpoint ------------------------------------------------------------------------------------------------------


class Server:
    """Answers `echo: ` and the last question, and ends by `length` where that holds `long`."""

    def __init__(self, chat: ChatTemplate) -> None:
        self.chat, self.gives_ids, self.knows_ids = chat, False, True
        self.shift = 0  # of the prompt's first token: another tokenizer
        self.failures: list[int] = []  # status codes of the next answers
        self.left = 10**9  # answers until it dies
        self.bodies: list[dict] = []
        self.keys: list[str | None] = []
        self.lock = threading.Lock()

    def respond(self, body: dict) -> tuple[int, dict]:
        with self.lock:
            if self.failures:
                return self.failures.pop(0), {"error": "later"}
            if not self.knows_ids and "return_token_ids" in body:
                return 400, {"error": "unknown field return_token_ids"}
            if not self.left:
                return 503, {"error": "no more"}
            self.left -= 1
            self.bodies.append(body)
            messages = body["messages"]
            reason = "length" if "long" in messages[-1]["content"] else "stop"
            text = f"echo: {messages[-1]['content']}"
            answer = {"choices": [{"message": {"content": text}, "finish_reason": reason}]}
            if self.gives_ids:
                prompt = self.chat.prompt(messages)
                answer["prompt_token_ids"] = [prompt[0] + self.shift, *prompt[1:]]
                answer["choices"][0]["token_ids"] = [77, 78, *([2] if reason == "stop" else [])]
            return 200, answer


@pytest.fixture
def server(model: Model) -> Iterator[tuple[Server, str]]:
    state = Server(ChatTemplate(model.tokenizer, (2,)))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.keys.append(self.headers["Authorization"])
            code, answer = state.respond(body)
            data = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            found = {"data": [{"id": "other"}, {"id": "served", "max_model_len": 99}]} if state.knows_ids else []
            data = json.dumps(found).encode()
            self.send_response(200 if self.path == "/v1/models" else 404)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
    yield state, f"http://127.0.0.1:{httpd.server_port}/v1/"
    httpd.shutdown()
    httpd.server_close()


def asked(model: Model, url: str, tries: int = 3) -> Asked:
    endpoint = Endpoint(url, "served", key="k", tries=tries, pause=0.001)
    return Asked(endpoint, ChatTemplate(model.tokenizer, (2,)), 256, SETTINGS, concurrency=3)


@pytest.mark.parametrize("ids", ["given", "ignored", "refused"])
def test_an_endpoint_answers(model: Model, server: tuple[Server, str], tmp_path: Path, ids: str) -> None:
    state, url = server
    state.gives_ids, state.knows_ids = ids == "given", ids != "refused"
    state.failures = [500, 429]  # tried again
    talks = [talk("a", "b"), talk("long", "b", system="s"), talk("c")]
    result = prepare(talks, asked(model, url), MADE_FOR, tmp_path)
    assert (result.whole.conversations, result.whole.length, result.whole.cut) == (3, 1, 1)
    sequences = everything(tmp_path)
    answers = [s.tokens[start:end] for s in sequences for start, end in s.spans]
    if ids == "given":
        # its second question came after the text of the first answer, of which the server made other tokens
        assert [len(s.spans) for s in sequences] == [1, 1, 1, 1]
        assert answers == [(77, 78, 2), (77, 78, 2), (77, 78), (77, 78, 2)]
    else:
        texts = ["echo: a</s>", "echo: b</s>", "echo: long", "echo: c</s>"]
        assert [state.chat.whole_text(tokens) for tokens in answers] == texts, "an end token after stop only"
        assert [len(s.spans) for s in sequences] == [2, 1, 1]
    for sequence in sequences:
        start = sequence.spans[0][0]
        assert state.chat.whole_text(sequence.tokens[:start]).endswith("</s><turn>assistant:")
    assert set(state.keys) == {"Bearer k"}
    body = next(body for body in state.bodies if body["messages"][0]["content"] == "s")
    assert body["messages"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "long"}]
    assert (body["model"], body["temperature"], body["max_tokens"], body["seed"]) == ("served", 0.9, 14, 6)
    follow = next(body for body in state.bodies if len(body["messages"]) == 3)
    assert [message["content"] for message in follow["messages"]] == ["a", "echo: a", "b"]


def test_an_endpoint_that_dies_keeps_what_it_answered(model: Model, server: tuple[Server, str], tmp_path: Path) -> None:
    state, url = server
    state.left = 5
    talks = [talk(f"question {i}") for i in range(9)]
    with pytest.raises(EndpointError, match="no answer in 3 tries: 503"):
        prepare(talks, asked(model, url), MADE_FOR, tmp_path, shard=4)
    missing = Folder(tmp_path, read_header(tmp_path)).missing()
    assert 4 <= len(missing) <= 6
    before, state.left = len(state.bodies), 99
    result = prepare(talks, asked(model, url), MADE_FOR, tmp_path, shard=4)
    assert result.new.conversations == len(missing)
    questions = {body["messages"][0]["content"] for body in state.bodies[before:]}
    assert questions == {f"question {number}" for number in missing}, "nothing is asked twice"
    assert len(everything(tmp_path)) == 9


def test_an_endpoint_of_another_model_is_refused(model: Model, server: tuple[Server, str], tmp_path: Path) -> None:
    state, url = server
    state.gives_ids, state.shift = True, 1
    with pytest.raises(EndpointError, match="another tokenizer or chat template"):
        prepare([talk("a")], asked(model, url), MADE_FOR, tmp_path)
    state.gives_ids, state.knows_ids = False, False
    state.failures = [400, 404]
    with pytest.raises(EndpointError, match="refuses: 404"):
        prepare([talk("a")], asked(model, url), MADE_FOR, tmp_path)
    with pytest.raises(EndpointError, match="no answer in 2 tries"):
        prepare([talk("a")], asked(model, "http://127.0.0.1:9/v1", tries=2), MADE_FOR, tmp_path)
    with pytest.raises(InputError, match="an address like"):
        Endpoint("localhost:8000", "m")


def test_an_endpoint_may_tell_its_context(server: tuple[Server, str]) -> None:
    state, url = server
    assert Endpoint(url, "served").max_length() == 99
    assert Endpoint(url, "unknown").max_length() is None
    assert Endpoint(url, "other").max_length() is None
    assert Endpoint(url + "wrong", "served").max_length() is None
    state.knows_ids = False
    assert Endpoint(url, "served").max_length() is None
    assert Endpoint("http://127.0.0.1:9/v1", "served").max_length() is None


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "p.jsonl", MESSAGES, SHAREGPT, {"turns": ["a"]})
    command = ["prepare", "--target", str(folder / "target"), "--prompts", str(prompts), "--max-new-tokens", "6"]
    out = str(tmp_path / "out")
    assert main([*command, "--out", out, "--dtype", "float64", "--json", "--show", "1"]) == 0
    printed, err = capsys.readouterr()
    record = json.loads(printed)
    assert printed.count("\n") == 1
    assert {"folder", "sequences", "prompt_tokens", "answer_tokens", "tokens_per_second", "finish", "cut"} <= set(
        record
    )
    assert (record["folder"], record["conversations"], sum(record["finish"].values())) == (out, 3, 1)
    assert "<turn>system:s</s><turn>user:a</s><turn>assistant:[[" in err
    assert main([*command, "--out", out, "--dtype", "float64", "--json"]) == 0, "done already"
    assert json.loads(capsys.readouterr().out)["new_tokens"] == 0
    assert main([*command, "--out", out, "--dtype", "float32"]) == 2
    assert "dtype was 'float64'" in capsys.readouterr().err
    kept = str(tmp_path / "kept")
    assert main([*command, "--out", kept, "--keep-answers", "--limit", "2", "--show", "2"]) == 0
    assert capsys.readouterr().out.count("assistant:[[b</s>]]\n\n") == 2
    assert main([*command, "--out", str(tmp_path / "no"), "--keep-answers"]) == 2
    assert f"{prompts}, line 3: the conversation has no assistant's turn" in capsys.readouterr().err
    (tmp_path / "empty.jsonl").write_text("\n")
    assert main([*command, "--prompts", str(tmp_path / "empty.jsonl"), "--out", str(tmp_path / "no")]) == 2
    assert "empty.jsonl holds no prompt" in capsys.readouterr().err
    made_for = read_header(tmp_path / "out")["target"]
    assert made_for == target_fingerprint(*load_target(str(folder / "target"), torch.float64)), "as training sees it"
    assert made_for["weights"] and read_header(tmp_path / "kept")["target"]["tokenizer"] == made_for["tokenizer"]


def test_shown_spans(model: Model) -> None:
    chat = ChatTemplate(model.tokenizer, (2,))
    sequence = Sequence(tuple(chat.encode("<turn>a:bc</s>d:e</s>")), ((3, 6), (8, 10)))
    assert shown(sequence, chat, colour=False) == "<turn>a:[[bc</s>]]d:[[e</s>]]"
    assert shown(sequence, chat, colour=True) == "<turn>a:\x1b[32mbc</s>\x1b[0md:\x1b[32me</s>\x1b[0m"


def test_an_outline_is_the_target_without_weights(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "target", tmp_path / "target")
    for ends in (2, [2, 7]):
        settings = {"eos_token_id": ends, "repetition_penalty": 1.5}
        (tmp_path / "target" / "generation_config.json").write_text(json.dumps(settings))
        target, _ = load_target(str(tmp_path / "target"))
        spec, tokenizer = load_outline(str(tmp_path / "target"))
        assert replace(spec, dtype=target.spec.dtype, device=target.spec.device) == target.spec
        assert spec.eos_ids == ((2,) if ends == 2 else (2, 7)) and tokenizer.encode("a")
    with pytest.raises(InputError, match="unknown target"):
        load_outline(str(tmp_path / "none"))
    (tmp_path / "target" / "config.json").write_text("{")
    with pytest.raises(InputError, match="cannot load the target"):
        load_outline(str(tmp_path / "target"))


def test_the_command_and_a_dead_endpoint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_text("a\nb\n")
    command = ["prepare", "--target", str(folder / "target"), "--prompts", str(tmp_path / "p.txt")]
    command += ["--out", str(tmp_path / "out")]
    monkeypatch.setattr("eyas.endpoint.time.sleep", lambda seconds: None)
    assert main([*command, "--endpoint", "http://127.0.0.1:9/v1", "--model", "m"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1].startswith("eyas: the endpoint http://127.0.0.1:9/v1 gives no answer")
    for more in (["--endpoint", "x"], ["--endpoint", "x", "--model", "m"], ["--temperatures", "0,-1"], ["--batch", "0"],
                 ["--temperatures", ""], ["--endpoint", "http://x", "--model", "m", "--keep-answers"]):  # fmt: skip
        assert main([*command, *more]) == 2
        assert capsys.readouterr().err.startswith("eyas: ")


def test_a_full_disk_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_text("a\n")
    command = ["prepare", "--target", str(folder / "target"), "--prompts", str(tmp_path / "p.txt")]
    command += ["--out", str(tmp_path / "out"), "--max-new-tokens", "2"]
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if "answers" in path.name or "open" in path.name:
            write(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        assert main(command) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith("eyas: ") and "No space left" in err and "Traceback" not in err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["header.json"]
    assert main(command) == 0
