"""Tokens <-> text: tokenizer, chat template, incremental detokenizer, stop strings.

A text is a function of its token ids and parameters alone, never of how many tokens came in one
step. Every token adds fixed bytes to the text, so detokenizing costs one table look-up and one
step of a UTF-8 decoder. Knows nothing about models, requests in flight or the server.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from truegraft.api import SamplingParams
from truegraft.errors import RequestError, TokenizerError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.parser import Parser
    from tokenizers import Tokenizer as Backend

Messages = Sequence[Mapping[str, Any]]

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
# Decoders under which a token adds the same text wherever it stands, except at the very start.
_PIECEWISE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class Tokenizer:
    """A `tokenizer.json` with its special tokens and chat templates.

    Make one with `from_directory`. Thread-safe: nothing changes after loading but caches.
    """

    def __init__(
        self,
        backend: Backend,
        special: Mapping[str, str],
        templates: Mapping[str, str],
        add_bos: bool = False,
    ) -> None:
        """Wrap `backend`; special: "bos_token" etc. -> text; templates: name -> jinja2 source.

        add_bos: put BOS before a prompt even where the post-processor does not.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special = dict(special)
        self._special_ids = _mark_special(backend, special.values())
        self._templates = {name: ChatTemplate(source) for name, source in templates.items()}
        self._byte_level, self._byte_fallback = _decoder_kind(backend)
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = backend.get_vocab_size()
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self._add_bos = add_bos
        self._template_adds_bos = backend.encode("").ids[:1] == [self.bos_token_id]

    @classmethod
    def from_directory(cls, path: Path, chat_template: str | None = None) -> Tokenizer:
        """Read the tokenizer of a Hugging Face directory.

        chat_template: jinja2 text or the path of a file with it; wins over the model's own.
        Raises TokenizerError.
        """
        config = _read_json(path / "tokenizer_config.json")
        names = {**_read_json(path / "special_tokens_map.json"), **config}
        return cls(
            _load_backend(path / "tokenizer.json"),
            _special_tokens(names),
            _find_templates(path, config, chat_template),
            add_bos=config.get("add_bos_token") is True,
        )

    def _id_of(self, name: str) -> int | None:
        token = self._special.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with BOS where the tokenizer says so, and never with two.

        Raises RequestError where `text` is not valid Unicode.
        """
        try:
            ids = list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError:
            raise RequestError(
                f"text {ascii(text)[:80]} cannot be encoded; send a string of valid Unicode, "
                "without lone surrogates."
            ) from None
        if add_special_tokens and self.bos_token_id is not None:
            self._fix_bos(ids, self.bos_token_id)
        return ids

    def _fix_bos(self, ids: list[int], bos: int) -> None:
        """Drop a BOS added to a text that began with one; add it where it is still due."""
        if self._template_adds_bos and ids[1:2] == [bos]:
            del ids[0]
        elif self._add_bos and ids[:1] != [bos]:
            ids.insert(0, bos)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids outside the vocabulary add nothing. Raises RequestError."""
        try:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise RequestError(f"token ids must be integers from 0: {error}.") from None

    def token(self, token_id: int) -> str:
        """One token as text, as it reads after other tokens; U+FFFD for parts of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token adds after other tokens; b"" outside the vocabulary."""
        piece = self._bytes.get(token_id)
        if piece is None:
            piece = self._bytes[token_id] = self._derive_bytes(token_id)
        return piece

    def _derive_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return _from_alphabet(token)
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        # Decoders treat only the first token of a text in a special way: look at the second.
        once, twice = (self.decode([token_id] * n, skip_special_tokens=False) for n in (1, 2))
        return twice[len(once) :].encode()

    def first_bytes(self, token_id: int) -> bytes:
        """The bytes of a token that starts a text: SentencePiece drops its leading space."""
        piece = self.token_bytes(token_id)
        if self._byte_level or (len(piece) == 1 and piece >= b"\x80"):
            return piece
        return self.decode([token_id], skip_special_tokens=False).encode()

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves this token out of a text."""
        return token_id in self._special_ids

    def is_known(self, token_id: int) -> bool:
        """Whether the id is in the vocabulary; models may have more rows than it has tokens."""
        return self._backend.id_to_token(token_id) is not None

    def byte_decoder(self) -> codecs.IncrementalDecoder:
        """A fresh UTF-8 decoder that replaces broken sequences as `decode` does."""
        errors = _EACH_BYTE if self._byte_fallback else "replace"
        return codecs.getincrementaldecoder("utf-8")(errors)

    def apply_chat_template(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Messages as the model's prompt text.

        messages: {"role", "content"} with content a string or a list of {"type": "text", "text"};
        other keys reach the template as they are. variables: more names for the template.
        Raises RequestError for bad messages, TokenizerError for a missing or broken template.
        """
        given = {
            **self._special,
            "documents": None,
            **variables,
            "messages": _check_messages(messages),
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._pick_template(bool(tools)).render(given)

    def encode_chat(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of `apply_chat_template`; special tokens are those the template writes."""
        text = self.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables
        )
        return self.encode(text, add_special_tokens=False)

    def _pick_template(self, with_tools: bool) -> ChatTemplate:
        names = ("tool_use", "default") if with_tools else ("default",)
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise TokenizerError(
            "this model has no chat template; pass chat_template= (jinja2 text or a file), "
            "or send a plain prompt instead of messages."
        )


class ChatTemplate:
    """A jinja2 template in the sandbox, with the helpers that chat templates expect."""

    def __init__(self, source: str) -> None:
        self._source = source

    def render(self, variables: Mapping[str, Any]) -> str:
        """The template's text.

        Raises RequestError with its message where the template calls `raise_exception`,
        TokenizerError where it fails in another way.
        """
        try:
            return self._compiled.render(variables)
        except RequestError:
            raise
        except Exception as error:  # a template is foreign code: it may raise anything
            raise TokenizerError(
                f"the chat template failed: {type(error).__name__}: {error}; "
                "mend it, or pass another with chat_template=."
            ) from error

    @cached_property
    def _compiled(self) -> Template:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _generation_extension()],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        return environment.from_string(self._source)


class Detokenizer:
    """Ids to text, one token at a time, never half a character.

    The pushes and the flush together equal `tokenizer.decode(output_ids)`, but for two things:
    after a prompt with text, a leading space stays; and valid characters in a run of byte-fallback
    tokens stay where `decode` would break the whole run for one bad byte.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        """prompt_ids only tell whether the output starts a text or goes on with one."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = tokenizer.byte_decoder()
        self._at_start = not any(self._is_shown(i) for i in reversed(prompt_ids))

    def push(self, token_id: int) -> str:
        """The text that this token completes; bytes of an unfinished character are held."""
        if self._at_start:
            if not self._is_shown(token_id):
                return ""
            self._at_start = False
            return self._utf8.decode(self._tokenizer.first_bytes(token_id))
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """U+FFFD for what is left of an unfinished character, else ""."""
        return self._utf8.decode(b"", final=True)

    def _is_shown(self, token_id: int) -> bool:
        hidden = self._skip_special_tokens and self._tokenizer.is_special(token_id)
        return not hidden and self._tokenizer.is_known(token_id)


class StopChecker:
    """Finds stop strings in a text that arrives in pieces of any size.

    The match is the stop string that is complete first (ties: the first of the list), so it does
    not depend on how the text was cut. Text that may yet become a stop string is held back.
    """

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        """stop: non-empty strings; include: give the stop string out with the text."""
        self._stop = tuple(stop)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, *, search: bool = True) -> tuple[str, str | None]:
        """Text that is safe to give out, and the stop string that `text` completed, if any.

        search=False passes over stop strings which end within `text`. After a match nothing more
        is given out.
        """
        if self.found is not None:
            return "", self.found
        if not self._stop:
            return text, None
        known = len(self._held)
        self._held += text
        if search and (match := self._first_match(known)):
            end, _, self.found = match
            start = end - len(self.found)
            return self._held[: end if self._include else start], self.found
        start = self._possible_start()
        safe, self._held = self._held[:start], self._held[start:]
        return safe, None

    def flush(self) -> str:
        """The held text, at the end of the stream; "" after a match."""
        held, self._held = self._held, ""
        return "" if self.found is not None else held

    def _first_match(self, known: int) -> tuple[int, int, str] | None:
        """(end, index, stop) of the match that ends first, after the first `known` characters."""
        matches = []
        for index, stop in enumerate(self._stop):
            start = self._held.find(stop, max(0, known - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), index, stop))
        return min(matches, default=None)

    def _possible_start(self) -> int:
        """Where the longest suffix begins that is a proper prefix of a stop string."""
        text, end = self._held, len(self._held)
        start = end
        for stop in self._stop:
            at = text.find(stop[0], max(0, end - len(stop) + 1), start)
            while at >= 0 and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1, start)
            start = at if at >= 0 else start
        return start


class OutputText:
    """The text of one sample, built token by token under its sampling parameters."""

    def __init__(
        self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], params: SamplingParams
    ) -> None:
        """tokenizer may be None with detokenize=False. Raises TokenizerError."""
        self._params = params
        self._num_tokens = 0
        self._parts: list[str] = []
        self._stops = StopChecker(params.stop_strings, params.include_stop_str_in_output)
        self._detokenizer: Detokenizer | None = None
        if params.detokenize:
            if tokenizer is None:
                raise TokenizerError("there is no tokenizer; pass detokenize=False.")
            self._detokenizer = Detokenizer(tokenizer, prompt_ids, params.skip_special_tokens)

    @property
    def text(self) -> str:
        """All text that is safe to show; final after `finish` or a stop string."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def append(self, token_id: int, *, is_stop_token: bool = False) -> str | None:
        """Add a token; returns the stop string that now ends the sample, or None.

        is_stop_token: EOS or one of stop_token_ids ends the sample with this token; its text
        counts only with include_stop_str_in_output. Stop strings that end within the first
        min_tokens tokens are passed over.
        """
        if self._detokenizer is None:
            return None
        self._num_tokens += 1
        if is_stop_token and not self._params.include_stop_str_in_output:
            return None
        search = not is_stop_token and self._num_tokens > self._params.min_tokens
        safe, stop = self._stops.push(self._detokenizer.push(token_id), search=search)
        if safe:
            self._parts.append(safe)
        return stop

    def finish(self) -> None:
        """Add what was held back. Call it once, after the last token, however the sample ended."""
        if self._detokenizer is not None and self._stops.found is None:
            self._parts += [self._stops.flush(), self._detokenizer.flush()]


def _load_backend(file: Path) -> Backend:
    from tokenizers import Tokenizer as Backend

    if not file.is_file():
        raise TokenizerError(
            f"{file} does not exist. Make it with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes a fast tokenizer."
        )
    try:
        return Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{file} cannot be read: {error}; save it again.") from error


def _mark_special(backend: Backend, named: Iterable[str]) -> frozenset[int]:
    """Ids of all special tokens, after making so those that only the configuration names."""

    def special_ids() -> frozenset[int]:
        added = backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    marked = special_ids()
    ids = {token: backend.token_to_id(token) for token in named}
    backend.add_special_tokens([t for t, i in ids.items() if i is not None and i not in marked])
    return special_ids()


def _decoder_kind(backend: Backend) -> tuple[bool, bool]:
    """(byte level, byte fallback). Raises TokenizerError for decoders that look across tokens."""
    types: set[str] = set()
    if backend.decoder is not None:
        state = json.loads(backend.decoder.__getstate__())
        types = {decoder["type"] for decoder in state.get("decoders", [state])}
    byte_level = types == {"ByteLevel"}
    if not byte_level and not types <= _PIECEWISE:
        raise TokenizerError(
            f"the decoder {sorted(types)} of tokenizer.json is not supported; "
            "use a byte-level or SentencePiece-like tokenizer."
        )
    return byte_level, "ByteFallback" in types


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file, {} where there is no file. Raises TokenizerError."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{file} cannot be read: {error}; save it again.") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} must hold a JSON object, not {type(content).__name__}.")
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text of the special tokens; each is given as a string or as {"content": string}."""
    found = {}
    for name in _SPECIAL:
        value = config.get(name)
        content = value.get("content") if isinstance(value, Mapping) else value
        if content is None:
            continue
        if not isinstance(content, str):
            raise TokenizerError(f"{name}={value!r} of tokenizer_config.json must be a string.")
        found[name] = content
    return found


def _find_templates(path: Path, config: Mapping[str, Any], given: str | None) -> dict[str, str]:
    """Name -> jinja2 source: the given one, else chat_template.jinja, else the configuration's."""
    if given is not None:
        # No jinja2 template goes without a brace, and hardly any path has one.
        return {"default": given if "{" in given else _read_template(Path(given))}
    configured = config.get("chat_template")
    if isinstance(configured, str):
        configured = [{"name": "default", "template": configured}]
    try:
        found = {str(entry["name"]): str(entry["template"]) for entry in configured or ()}
    except (TypeError, KeyError) as error:
        raise TokenizerError(
            "chat_template of tokenizer_config.json must be a string or a list of "
            "{name, template}; pass another with chat_template=."
        ) from error
    beside = path / "chat_template.jinja"
    return {**found, "default": _read_template(beside)} if beside.is_file() else found


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"chat_template={str(file)!r} is neither jinja2 text nor a readable file: {error}."
        ) from error


def _check_messages(messages: Messages) -> list[dict[str, Any]]:
    """Copies with every content a string. Raises RequestError naming the message."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError('messages must be a list, not empty, of {"role": …, "content": …}.')
    return [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _check_message(name: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f'{name}={message!r} must be {{"role": …, "content": …}}.')
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise RequestError(f'{name} role={role!r} must be a string, such as "user".')
    if content is None and message.get("tool_calls"):
        return dict(message)
    return {**message, "content": _join_content(name, content)}


def _join_content(name: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(f"{name} content={content!r} must be a string or a list of text parts.")
    return "".join(_part_text(name, part) for part in content)


def _part_text(name: str, part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, Mapping) else part
    raise RequestError(
        f'{name} has a content part {kind!r}; only {{"type": "text", "text": …}} is supported.'
    )


def _generation_extension() -> type[Any]:
    """{% generation %} … {% endgeneration %}, which marks what to train on: only its body."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationBlock(Extension):
        tags = {"generation"}  # noqa: RUF012 (a set on the class is what jinja2 asks for)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return GenerationBlock


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it; jinja2's own filter escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> NoReturn:
    raise RequestError(f"the chat template refuses these messages: {message}")


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: visible Latin-1 stands for itself, the rest follows."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden: Iterable[int] = (byte for byte in range(256) if byte not in visible)
    alphabet = {chr(byte): byte for byte in visible}
    return alphabet | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


_ALPHABET = _byte_alphabet()


def _from_alphabet(token: str) -> bytes:
    """Bytes of a byte-level token; an added token with other characters is plain text."""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


# Byte-fallback decoders write one U+FFFD for every byte, byte-level ones for every sequence.
_EACH_BYTE = "truegraft.each_byte"
codecs.register_error(_EACH_BYTE, _replace_each_byte)
