"""Tokenizer, chat template, detokenizer and stop strings, on tokenizers made here.

transformers is the oracle: it reads the same directories.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.trainers import BpeTrainer

from truegraft.api import SamplingParams
from truegraft.errors import RequestError, TokenizerError
from truegraft.text import Detokenizer, OutputText, StopChecker, Tokenizer

CORPUS = ["hello world, hello there", "the quick brown fox — naïve café", "日本語 😀 hello\n\nstop"]
CHATML = (
    "{% for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{% endif %}\n"
)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hello <there> 日本"},
]


def byte_level(*special: str, bos: str | None = None) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=340,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return backend


def sentencepiece() -> Backend:
    """What Llama 2 has: byte fallback, a word's space in front of it, one dropped at the start."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *string.ascii_lowercase, "he", "hel", "lo", "hello", "▁hello", "▁w", "▁▁"]
    merges = [("h", "e"), ("he", "l"), ("l", "o"), ("hel", "lo"), ("▁", "hello"), ("▁", "w")]
    backend = Backend(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[*merges, ("▁", "▁")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def metaspace() -> Backend:
    backend = sentencepiece()
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()]
    )
    return backend


def chatml() -> Backend:
    backend = byte_level("<|end|>", "<|im_start|>", "<|im_end|>")
    backend.add_tokens(["⟨tool call⟩", AddedToken("naïve", normalized=False)])
    return backend


CONFIGS: dict[str, dict[str, Any]] = {
    "chatml": {"bos_token": None, "eos_token": "<|im_end|>", "chat_template": CHATML},
    "bos": {
        "bos_token": {"content": "<s>", "special": True, "__type": "AddedToken"},
        "eos_token": "</s>",
        "chat_template": "{{ bos_token }}" + CHATML,
    },
    "sentencepiece": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "metaspace": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
}
BACKENDS: dict[str, Callable[[], Backend]] = {
    "chatml": chatml,
    "bos": lambda: byte_level("<s>", "</s>", "<|im_start|>", "<|im_end|>", bos="<s>"),
    "sentencepiece": sentencepiece,
    "metaspace": metaspace,
}
BYTE_LEVEL = ("chatml", "bos")
SPACED = ("sentencepiece", "metaspace")


def write(folder: Path, name: str, **changes: Any) -> Path:
    BACKENDS[name]().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **CONFIGS[name], **changes}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@cache
def tokenizer(name: str) -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer.from_directory(write(Path(folder), name))


def oracle(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def detokenize(name: str, ids: list[int], prompt: list[int], skip: bool = True) -> str:
    detokenizer = Detokenizer(tokenizer(name), prompt, skip)
    return "".join([detokenizer.push(i) for i in ids] + [detokenizer.flush()])


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    """Ids with a few beyond the vocabulary, as a padded output layer could give."""
    return st.lists(st.integers(0, tokenizer(name).vocab_size + 5), max_size=30)


def comes_from(name: str, again: str, text: str) -> bool:
    """Whether a text came back; SentencePiece may add or drop one space in front of it."""
    if name in BYTE_LEVEL:
        return again == text
    text = text.replace("▁", " ")
    return again in (text, " " + text, text.removeprefix(" "))


# Tokenizer


@pytest.mark.parametrize("name", BACKENDS)
def test_encode_and_decode_agree_with_transformers(name: str, tmp_path: Path) -> None:
    theirs = oracle(write(tmp_path, name))
    ours = Tokenizer.from_directory(tmp_path)
    texts = [*CORPUS, "", " ", "  two  spaces ", "zoë\t\n", "⟨tool call⟩x", "hello</s>"]
    for text in texts:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("name", ["bos", "sentencepiece"])
def test_bos_comes_once(name: str) -> None:
    ours = tokenizer(name)
    ids = ours.encode("hello")
    assert ids[0] == ours.bos_token_id and ids.count(ids[0]) == 1
    assert ours.encode("<s>" + "hello").count(ids[0]) == 1
    assert ours.bos_token_id not in ours.encode("hello", add_special_tokens=False)


def test_add_bos_token_adds_what_the_post_processor_does_not(tmp_path: Path) -> None:
    folder = write(tmp_path, "chatml", bos_token="<|end|>", add_bos_token=True)
    ours = Tokenizer.from_directory(folder)
    plain = ours.encode("hello", add_special_tokens=False)
    assert ours.encode("hello") == [ours.bos_token_id, *plain]
    assert ours.encode("<|end|>hello") == [ours.bos_token_id, *plain]


def test_a_repeated_token_that_only_names_bos_is_kept(tmp_path: Path) -> None:
    folder = write(tmp_path, "chatml", bos_token="<|end|>")
    ours = Tokenizer.from_directory(folder)
    assert ours.encode("<|end|><|end|>") == [ours.bos_token_id] * 2


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    write(tmp_path, "bos")
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(backend.encode("a b c d e f g h")) == 64
    ids = Tokenizer.from_directory(tmp_path).encode("a b c d e f g h")
    assert ids == tokenizer("bos").encode("a b c d e f g h") and 8 < len(ids) < 64


def test_special_tokens_of_the_map_are_read_and_skipped(tmp_path: Path) -> None:
    folder = write(tmp_path, "chatml")
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "naïve"}}')
    ours = Tokenizer.from_directory(folder)
    assert ours.eos_token_id == tokenizer("chatml").encode("naïve")[0]
    assert ours.eos_token_id is not None and ours.is_special(ours.eos_token_id)
    assert ours.decode([ours.eos_token_id]) == ""


def test_a_special_token_keeps_how_it_matches(tmp_path: Path) -> None:
    write(tmp_path, "bos", eos_token="<|stop|>")
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens([AddedToken("<|stop|>", lstrip=True, rstrip=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    ids = Tokenizer.from_directory(tmp_path).encode("a <|stop|> b")
    assert ids == backend.encode("a <|stop|> b").ids and len(ids) == 4


def test_a_missing_tokenizer_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="AutoTokenizer"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "\udcff"])
def test_broken_files_are_named(file: str, content: str, tmp_path: Path) -> None:
    write(tmp_path, "chatml")
    (tmp_path / file).write_text(content, errors="surrogateescape")
    with pytest.raises(TokenizerError, match=file):
        Tokenizer.from_directory(tmp_path)


def test_a_decoder_that_looks_across_tokens_is_refused(tmp_path: Path) -> None:
    backend = chatml()
    backend.decoder = decoders.CTC()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=r"decoder \['CTC'\]"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("text", ["\ud83d", None, 3, ["a"]])
def test_what_is_not_text_is_refused(text: Any) -> None:
    with pytest.raises(RequestError, match="valid Unicode"):
        tokenizer("bos").encode(text)


@pytest.mark.parametrize("ids", [[-1], [2**40], ["a"]])
def test_what_is_not_an_id_is_refused(ids: Any) -> None:
    with pytest.raises(RequestError, match="token ids"):
        tokenizer("bos").decode(ids)


def test_a_token_reads_as_it_does_after_others() -> None:
    ours = tokenizer("sentencepiece")
    space_hello, accent = ours.encode("hello")[1], ours.encode("é")[-2:]
    assert ours.token(space_hello) == " hello"
    assert [ours.token(i) for i in accent] == ["\ufffd", "\ufffd"]
    assert b"".join(ours.token_bytes(i) for i in accent) == "é".encode()
    assert ours.token(2) == "</s>" and ours.token(ours.vocab_size) == ""


@given(text=st.text())
@pytest.mark.parametrize("name", BACKENDS)
def test_the_bytes_of_a_texts_tokens_are_the_text(name: str, text: str) -> None:
    ids = tokenizer(name).encode(text, add_special_tokens=False)
    assert comes_from(name, b"".join(tokenizer(name).token_bytes(i) for i in ids).decode(), text)


# Chat templates


@pytest.mark.parametrize("name", ["chatml", "bos"])
def test_chat_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    theirs = oracle(write(tmp_path, name))
    ours = Tokenizer.from_directory(tmp_path)
    for prompt in (True, False):
        text = theirs.apply_chat_template(MESSAGES, add_generation_prompt=prompt, tokenize=False)
        assert ours.apply_chat_template(MESSAGES, add_generation_prompt=prompt) == text
        ids = theirs.apply_chat_template(MESSAGES, add_generation_prompt=prompt)["input_ids"]
        assert ours.encode_chat(MESSAGES, add_generation_prompt=prompt) == ids
    if name == "bos":
        assert ours.bos_token_id is not None
        assert ours.encode_chat(MESSAGES).count(ours.bos_token_id) == 1


def test_chat_adds_no_bos_that_the_template_does_not_write(tmp_path: Path) -> None:
    ours = Tokenizer.from_directory(write(tmp_path, "bos", chat_template=CHATML))
    assert ours.encode("hello")[0] == ours.bos_token_id
    assert ours.bos_token_id not in ours.encode_chat(MESSAGES)


def test_no_tools_is_none_for_the_template(tmp_path: Path) -> None:
    ours = Tokenizer.from_directory(write(tmp_path, "bos"), "{{ tools is none }}")
    assert ours.apply_chat_template(MESSAGES, tools=[]) == "True"


HELPERS = [
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{{ messages | tojson }}|{{ messages[1] | tojson(indent=2) }}",
    "{{ tools | tojson(sort_keys=True) }}{% if tools is none %}none{% endif %}",
    "{% generation %}\n{% set x = 1 %}{{ messages[0].content }}{% endgeneration %}{{ x }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ bos_token }}{{ eos_token }}{{ flavour }}{{ documents is none }}",
    "{% if messages %}  \n  {# note #}\n  {% endif %}\n{{ strftime_now('%%') }}\n",
]


@pytest.mark.parametrize("template", HELPERS)
def test_template_helpers_agree_with_transformers(template: str, tmp_path: Path) -> None:
    theirs = oracle(write(tmp_path, "bos"))
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"é": "<'>"}}}]
    ours = Tokenizer.from_directory(tmp_path, chat_template=template)
    for given_tools in (None, tools):
        text = ours.apply_chat_template(MESSAGES, tools=given_tools, flavour="mint")
        assert text == theirs.apply_chat_template(
            MESSAGES,
            chat_template=template,
            tools=given_tools,
            add_generation_prompt=True,
            flavour="mint",
            tokenize=False,
        )


def test_which_template_wins(tmp_path: Path) -> None:
    listed = [
        {"name": "default", "template": "{{ 'd' }}"},
        {"name": "tool_use", "template": "{{ 't' }}"},
    ]
    write(tmp_path, "bos", chat_template=listed)
    (tmp_path / "mine.txt").write_text("{{ 'file' }}")

    def rendered(chat_template: str | None = None, tools: Any = None) -> str:
        ours = Tokenizer.from_directory(tmp_path, chat_template)
        return ours.apply_chat_template(MESSAGES, tools=tools)

    assert (rendered(), rendered(tools=[{}])) == ("d", "t")
    (tmp_path / "chat_template.jinja").write_text("{{ 'beside' }}")
    assert (rendered(), rendered(tools=[{}])) == ("beside", "t")
    assert rendered("{{ 'text' }}") == "text"
    assert rendered(str(tmp_path / "mine.txt")) == "file"
    with pytest.raises(TokenizerError, match="neither jinja2 text nor a readable file"):
        rendered("no-such-file")


def test_a_model_without_template_names_the_way_out() -> None:
    with pytest.raises(TokenizerError, match="chat_template="):
        tokenizer("sentencepiece").apply_chat_template(MESSAGES)


@pytest.mark.parametrize("value", [3, [{"name": "default"}], ["text"]])
def test_a_malformed_template_entry_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="chat_template"):
        Tokenizer.from_directory(write(tmp_path, "bos", chat_template=value))


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ messages[9].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_broken_or_hostile_template_is_a_tokenizer_error(template: str, tmp_path: Path) -> None:
    ours = Tokenizer.from_directory(write(tmp_path, "bos"), chat_template=template)
    with pytest.raises(TokenizerError, match="the chat template failed"):
        ours.apply_chat_template(MESSAGES)


def test_raise_exception_is_the_requests_error(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    ours = Tokenizer.from_directory(write(tmp_path, "bos"), chat_template=template)
    with pytest.raises(RequestError, match="roles must alternate"):
        ours.apply_chat_template(MESSAGES)


def test_text_parts_are_joined_and_tool_calls_pass() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ours = tokenizer("bos")
    joined = ours.apply_chat_template([{"role": "user", "content": parts}])
    assert joined == ours.apply_chat_template([{"role": "user", "content": "ab"}])
    calls = [{"function": {"name": "f", "arguments": {}}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    with pytest.raises(TokenizerError, match="NoneType"):  # it came to the template as it is
        ours.apply_chat_template([message])


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ({"role": "user"}, "messages"),
        (["hello"], r"messages\[0\]"),
        ([*MESSAGES, {"content": "x"}], r"messages\[2\] role"),
        ([{"role": "user"}], r"messages\[0\] content"),
        ([{"role": "user", "content": 3}], r"messages\[0\] content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "text"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]"),
    ],
)
def test_bad_messages_are_named(messages: Any, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        tokenizer("bos").apply_chat_template(messages)


# Detokenizer


@given(data=st.data(), skip=st.booleans())
@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_byte_level_pushes_are_the_whole_decode(name: str, data: st.DataObject, skip: bool) -> None:
    ids, prompt = data.draw(ids_of(name)), data.draw(ids_of(name))
    assert detokenize(name, ids, prompt, skip) == tokenizer(name).decode(ids, skip)


@pytest.mark.parametrize("name", BACKENDS)
def test_each_token_alone_is_its_decode(name: str) -> None:
    for i in range(tokenizer(name).vocab_size + 2):
        assert detokenize(name, [i], [], skip=False) == tokenizer(name).decode([i], False)


def without_byte_tokens(name: str) -> st.SearchStrategy[list[int]]:
    """Random ids where byte tokens come as whole characters, or as one bad byte between words."""
    ours = tokenizer(name)
    byte = ours.encode("\x00", add_special_tokens=False)[-1]
    word = st.integers(byte + 256, ours.vocab_size + 5).map(lambda i: [i])
    special = st.integers(0, 2).map(lambda i: [i])
    char = st.characters(exclude_categories=["Cs"]).map(lambda c: [byte + b for b in c.encode()])
    bad = st.lists(st.integers(byte + 0x80, byte + 0xFF), min_size=1, max_size=3)
    spaced = st.tuples(word, bad, word).filter(lambda t: t[2][0] < ours.vocab_size)
    pieces = word | special | char | spaced.map(lambda t: [*t[0], *t[1], *t[2]])
    return st.lists(pieces, max_size=12).map(lambda parts: [i for part in parts for i in part])


def runs_are_valid(name: str, ids: list[int], skip: bool) -> bool:
    """Whether each run of byte tokens is all characters or has none: there `decode` loses none."""
    ours = tokenizer(name)
    first = ours.encode("\x00", add_special_tokens=False)[-1]
    shown = [i for i in ids if ours.is_known(i) and not (skip and ours.is_special(i))]
    runs: list[bytes] = [b""]
    for i in shown:
        if first <= i < first + 256:
            runs[-1] += bytes([i - first])
        else:
            runs.append(b"")
    broken = (run for run in runs if not_utf8(run))
    return all(not run.decode(errors="ignore") for run in broken)


def not_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return True
    return False


@given(data=st.data(), skip=st.booleans())
@pytest.mark.parametrize("name", SPACED)
def test_spaced_pushes_are_the_rest_of_the_whole_decode(
    name: str, data: st.DataObject, skip: bool
) -> None:
    ours = tokenizer(name)
    ids = data.draw(without_byte_tokens(name).filter(lambda i: runs_are_valid(name, i, skip)))
    assert detokenize(name, ids, [], skip) == ours.decode(ids, skip)
    prompt = data.draw(without_byte_tokens(name)) + ours.encode("hello", add_special_tokens=False)
    before, whole = ours.decode(prompt, skip), ours.decode(prompt + ids, skip)
    assert whole.startswith(before)
    assert detokenize(name, ids, prompt, skip) == whole[len(before) :]


@given(text=st.text(), prompt=st.text())
@pytest.mark.parametrize("name", BACKENDS)
def test_a_text_comes_back(name: str, text: str, prompt: str) -> None:
    ours = tokenizer(name)
    ids = ours.encode(text, add_special_tokens=False)
    assert comes_from(name, detokenize(name, ids, ours.encode(prompt), skip=False), text)


@given(text=st.text(min_size=1))
@pytest.mark.parametrize("name", BACKENDS)
def test_no_piece_is_half_a_character(name: str, text: str) -> None:
    ours = tokenizer(name)
    detokenizer = Detokenizer(ours)
    for i in ours.encode(text.replace("\ufffd", ""), add_special_tokens=False):
        assert "\ufffd" not in detokenizer.push(i)
    assert detokenizer.flush() == ""


@pytest.mark.parametrize(
    ("name", "left"), [("chatml", "\ufffd"), ("bos", "\ufffd"), ("sentencepiece", "\ufffd" * 3)]
)
def test_flush_gives_what_decode_gives_for_half_a_character(name: str, left: str) -> None:
    ours = tokenizer(name)
    ids = [i for i in range(ours.vocab_size) if ours.token_bytes(i) in (b"\xf0", b"\x9f", b"\x98")]
    ids.sort(key=lambda i: b"\xf0\x9f\x98".index(ours.token_bytes(i)))
    detokenizer = Detokenizer(ours)
    assert [detokenizer.push(i) for i in ids] == ["", "", ""]
    assert detokenizer.flush() == left == ours.decode(ids)


def test_a_newline_of_byte_tokens_comes_at_once() -> None:
    ours = tokenizer("sentencepiece")
    newline, broken = ours.encode("\n")[-1], ours.encode("é")[-2]
    detokenizer = Detokenizer(ours)
    assert detokenizer.push(newline) == "\n"
    assert detokenizer.push(broken) + detokenizer.flush() == "\ufffd"


def test_the_leading_space_depends_on_the_prompt() -> None:
    ours = tokenizer("sentencepiece")
    ids = ours.encode("hello", add_special_tokens=False)
    assert detokenize("sentencepiece", ids, []) == "hello"
    assert detokenize("sentencepiece", ids, [1]) == "hello"  # BOS alone is no text
    assert detokenize("sentencepiece", ids, [1, *ids]) == " hello"
    assert detokenize("sentencepiece", [1, ours.vocab_size, *ids], []) == "hello"


# Stop strings

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


def first_complete(text: str, stops: list[str], after: int = 0) -> tuple[int, str | None]:
    """(end, stop) by definition: read on until the text ends with a stop string."""
    for end in range(after + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end, stop
    return len(text), None


def run_checker(checker: StopChecker, pieces: list[str]) -> tuple[str, str | None]:
    out = []
    for piece in pieces:
        safe, found = checker.push(piece)
        out.append(safe)
        if found is not None:
            break
    return "".join([*out, checker.flush()]), checker.found


@given(pieces=st.lists(st.text("abc", max_size=5), max_size=8), stops=STOPS, include=st.booleans())
def test_stops_do_not_depend_on_the_pieces(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    text = "".join(pieces)
    end, stop = first_complete(text, stops)
    kept = text[:end] if include or stop is None else text[: end - len(stop)]
    assert run_checker(StopChecker(stops, include), pieces) == (kept, stop)
    assert run_checker(StopChecker(stops, include), [text]) == (kept, stop)


@given(pieces=st.lists(st.text("abc", max_size=5), max_size=8), stops=STOPS)
@example(pieces=["cab"], stops=["abab", "ba"])
def test_only_what_may_become_a_stop_is_held(pieces: list[str], stops: list[str]) -> None:
    checker, given_out, seen = StopChecker(stops), "", ""
    for piece in pieces:
        safe, found = checker.push(piece)
        if found is not None:
            return
        given_out, seen = given_out + safe, seen + piece
        prefixes = {stop[:n] for stop in stops for n in range(len(stop))} | {""}
        assert seen[len(given_out) :] == max((p for p in prefixes if seen.endswith(p)), key=len)


@given(skipped=st.text("abc", max_size=6), text=st.text("abc", max_size=6), stops=STOPS)
@example(skipped="aba", text="c", stops=["abab", "ba"])
def test_stops_that_end_in_skipped_text_are_passed_over(
    skipped: str, text: str, stops: list[str]
) -> None:
    checker = StopChecker(stops)
    safe, found = checker.push(skipped, search=False)
    assert found is None
    end, stop = first_complete(skipped + text, stops, after=len(skipped))
    rest, found = run_checker(checker, [text])
    assert (safe + rest, found) == ((skipped + text)[: end - len(stop or "")], stop)


def test_ties_go_to_the_first_of_the_list() -> None:
    assert StopChecker(["abc", "bc"]).push("xabc") == ("x", "abc")
    assert StopChecker(["bc", "abc"]).push("xabc") == ("xa", "bc")
    assert StopChecker(["abcd", "bc"]).push("xabcd") == ("xa", "bc")  # complete first


def test_nothing_is_given_out_after_a_match() -> None:
    checker = StopChecker(["."])
    assert checker.push("a.b") == ("a", ".")
    assert (checker.push("c"), checker.flush()) == (("", "."), "")


# OutputText


def output(ids: list[int], stop_token: bool = False, **params: Any) -> tuple[str, str | None, int]:
    """(text, stop string, tokens used)."""
    out = OutputText(tokenizer("chatml"), [], SamplingParams(max_tokens=None, **params))
    used, stop = 0, None
    for used, i in enumerate(ids, 1):
        stop = out.append(i, is_stop_token=stop_token and used == len(ids))
        if stop is not None:
            break
    out.finish()
    return out.text, stop, used


def encode(text: str) -> list[int]:
    """One token per byte, so that tests know where tokens end."""
    ours = tokenizer("chatml")
    single = {ours.token_bytes(i): i for i in reversed(range(ours.vocab_size))}
    return [single[bytes([byte])] for byte in text.encode()]


def test_a_stop_string_ends_the_text_before_it() -> None:
    assert output(encode("one two three"), stop="two") == ("one ", "two", 7)
    assert output(encode("one two"), stop="two", include_stop_str_in_output=True)[0] == "one two"
    assert output(encode("one tw"), stop="two") == ("one tw", None, 6)


def test_a_stop_string_inside_a_token_cuts_it() -> None:
    hello = tokenizer("chatml").encode("hello")
    assert len(hello) == 1
    assert output([*hello, *hello], stop="ll") == ("he", "ll", 1)


@pytest.mark.parametrize(("min_tokens", "used"), [(0, 2), (1, 2), (2, 4), (4, None)])
def test_min_tokens_pass_over_stop_strings(min_tokens: int, used: int | None) -> None:
    text, stop, count = output(encode("a.b."), stop=".", min_tokens=min_tokens)
    assert (stop, count) == ((".", used) if used else (None, 4))
    assert text == "a.b."[: (used or 5) - 1]


def test_a_stop_string_may_begin_within_min_tokens() -> None:
    assert output(encode("ab--c"), stop="--", min_tokens=3) == ("ab", "--", 4)
    assert output(encode("a-b"), stop="-b", min_tokens=3) == ("a-b", None, 3)


def test_the_text_of_a_stop_token_counts_only_if_included() -> None:
    end = tokenizer("chatml").eos_token_id or 0
    ids = [*encode("hi"), end]
    shown = {"skip_special_tokens": False}
    assert output(ids, stop_token=True, **shown)[0] == "hi"
    assert output(ids, stop_token=True, include_stop_str_in_output=True, **shown)[0] == (
        "hi<|im_end|>"
    )
    assert output(ids, stop_token=True, include_stop_str_in_output=True)[0] == "hi"
    assert output(encode("hix"), stop_token=True)[0] == "hi"
    assert output(encode("hix"), stop_token=True, include_stop_str_in_output=True)[0] == "hix"


def test_a_stop_token_ends_the_sample_before_its_text_is_searched() -> None:
    params = {"stop": ".", "include_stop_str_in_output": True}
    assert output(encode("a."), stop_token=True, **params) == ("a.", None, 2)


def test_nothing_follows_a_stop_string() -> None:
    ours = tokenizer("chatml")
    two, four = (
        next(i for i in range(400) if ours.token_bytes(i) == b) for b in (b"\xc3", b"\xf0")
    )
    assert output([two, four], stop="\ufffd", include_stop_str_in_output=True)[0] == "\ufffd"


def test_half_a_character_and_held_text_come_at_the_end() -> None:
    ids = encode("ab.é")[:-1]
    out = OutputText(tokenizer("chatml"), [], SamplingParams(stop="b.c"))
    for i in ids[:-1]:
        out.append(i)
    assert out.text == "a"
    out.append(ids[-1])
    out.finish()
    assert out.text == "ab.\ufffd"


def test_without_detokenizing_no_tokenizer_is_needed() -> None:
    out = OutputText(None, [], SamplingParams(detokenize=False))
    assert out.append(3) is None
    out.finish()
    assert out.text == ""
    with pytest.raises(TokenizerError, match="detokenize=False"):
        OutputText(None, [], SamplingParams())


@given(data=st.data(), min_tokens=st.integers(0, 10), include=st.booleans())
def test_output_text_is_the_decode_up_to_the_stop(
    data: st.DataObject, min_tokens: int, include: bool
) -> None:
    ours = tokenizer("chatml")
    stops = data.draw(st.lists(st.sampled_from(["e", "lo", "\n", "é", "\ufffd", "<|"]), max_size=3))
    ids = data.draw(ids_of("chatml"))
    text, stop, used = output(
        ids, stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include
    )
    assert used <= len(ids) and (stop is None or used > min_tokens)
    whole = ours.decode(ids)
    assert whole.startswith(text)
    if stop is None:
        assert text == whole
    else:
        assert whole[len(text) - len(stop) * include :].startswith(stop)
