"""What the scanner takes for a secret, and what it leaves alone."""

from __future__ import annotations

import base64
import hashlib
import json
import random
from uuid import UUID

import pytest

from chaz.runtime.ownsecrets import own_secrets
from chaz.runtime.scanner import SecretScanner

seeded = random.Random(7)
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


def some(length: int, alphabet: str = ALPHABET) -> str:
    return "".join(seeded.choices(alphabet, k=length))


def unpadded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def key(kind: str) -> str:
    lines = "\n".join(base64.b64encode(seeded.randbytes(48)).decode() for _ in range(25))
    return f"-----BEGIN {kind}PRIVATE KEY-----\n{lines}\n-----END {kind}PRIVATE KEY-----"


SECRETS = {
    "github": "ghp_" + some(36),
    "github, fine-grained": f"github_pat_{some(22)}_{some(59)}",
    "slack": f"xoxb-{some(12, '0123456789')}-{some(12, '0123456789')}-{some(24)}",
    "stripe": "sk_live_" + some(24),
    "openai": f"sk-proj-{some(74)}T3BlbkFJ{some(74)}",
    "anthropic": f"sk-ant-api03-{some(93)}AA",
    "google": "AIza" + some(35),
    "jwt": ".".join(
        unpadded(part) for part in (b'{"alg":"HS256","typ":"JWT"}', b'{"sub":"1234567890"}', seeded.randbytes(32))
    ),
    "rsa": key("RSA "),
    "openssh": key("OPENSSH "),
    "pkcs8": key(""),
}


@pytest.fixture(scope="module")
def scanner() -> SecretScanner:
    return SecretScanner({})


@pytest.mark.parametrize("name", SECRETS)
def test_the_whole_secret_goes_and_nothing_else(scanner: SecretScanner, name: str) -> None:
    text, kinds = scanner.scan(f"Gefunden \N{GRINNING FACE}: {SECRETS[name]} und weiter")

    assert text == f"Gefunden \N{GRINNING FACE}: [redacted: {kinds[0]}] und weiter"


@pytest.mark.parametrize("name", SECRETS)
def test_neither_json_nor_an_escape_hides_it(scanner: SecretScanner, name: str) -> None:
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in SECRETS[name])
    for text in (json.dumps({"a": [SECRETS[name]]}), f'{{"a": ["{escaped}"]}}'):
        clean, kinds = scanner.scan_json(text)
        assert json.loads(clean) == {"a": [f"[redacted: {kinds[0]}]"]}


def test_an_aws_secret_key_goes_with_its_id(scanner: SecretScanner) -> None:
    id, secret = "AKIA" + some(16, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"), some(40)
    text, _ = scanner.scan(f"aws_access_key_id = {id}\naws_secret_access_key = {secret}\n")

    assert id not in text
    assert secret not in text


def test_only_the_password_of_a_url_goes(scanner: SecretScanner) -> None:
    url = "postgresql://app:9N2QP4MxQILn@db.acme.io:5432/app"

    assert (
        scanner.scan(f"at {url}!").text == "at postgresql://app:[redacted: generic-credential-uri]@db.acme.io:5432/app!"
    )


def test_a_secret_that_stands_twice_goes_twice(scanner: SecretScanner) -> None:
    text, _ = scanner.scan("at https://bob:9N2QP4MxQILn@git.acme.io/x, so say 9N2QP4MxQILn")

    assert "9N2QP4MxQILn" not in text


NO_SECRETS = {
    "uuids": "\n".join(f"run_id={UUID(bytes=seeded.randbytes(16))}" for _ in range(50)),
    "uuids of keys": json.dumps({"api_key_id": str(UUID(int=7**40)), "token_id": str(UUID(int=5**50))}),
    "sha256": "\n".join(f"sha256:{hashlib.sha256(seeded.randbytes(9)).hexdigest()}" for _ in range(50)),
    "commits": "\n".join(f"commit {seeded.randbytes(20).hex()}" for _ in range(50)),
    "integrity": "integrity sha512-" + base64.b64encode(seeded.randbytes(64)).decode(),
    "an image": "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + seeded.randbytes(60_000)).decode(),
    "a public key": f"ssh-rsa {base64.b64encode(seeded.randbytes(270)).decode()} ada@host",
    "prose": "The password must have eight characters. Set OPENAI_API_KEY=...; your token: see the docs.",
    "a url": "postgresql://app@db.acme.io/app and https://acme.io/a:b@c",
}


@pytest.mark.parametrize("name", NO_SECRETS)
def test_what_is_no_secret_stays(scanner: SecretScanner, name: str) -> None:
    assert scanner.scan(NO_SECRETS[name]) == (NO_SECRETS[name], ())


# The deployment's own


ENVIRONMENT = {
    "OPENAI_API_KEY": "of no-known/form",
    "CHAZ_DATABASE_URL": "postgresql://chaz:p%40ss-w0rd%2F1@db/chaz",
    "CHAZ_BROKER_URL": "amqp://guest:guest@127.0.0.1:5672//",
    "POSTGRES_PASSWORD": "postgres",
    "MAX_TOKENS": "1000000000",
    "GOOGLE_APPLICATION_CREDENTIALS": __file__,
    "HOME": "/home/somebody-or-other",
}


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("key: of no-known/form.", "key: [redacted: OPENAI_API_KEY]."),
        ("?key=of%20no-known%2Fform", "?key=[redacted: OPENAI_API_KEY]"),
        ("it is p@ss-w0rd/1", "it is [redacted: CHAZ_DATABASE_URL]"),
        (f"guest postgres 1000000000 {__file__} /home/somebody-or-other", None),
    ],
)
def test_what_the_deployment_holds_goes_in_any_form(text: str, clean: str | None) -> None:
    assert SecretScanner(own_secrets(ENVIRONMENT)).scan(text).text == (clean or text)


def test_a_url_that_is_no_variable_s_is_known_too() -> None:
    scanner = SecretScanner(own_secrets({}, "redis://:Tr0ub4dor-3@cache"))

    assert scanner.scan("it is Tr0ub4dor-3").text == "it is [redacted: password]"
