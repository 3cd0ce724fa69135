"""Addresses of a Redis: the forms, and what is shown of them."""

from __future__ import annotations

import pytest

from bifolio.kv_manager.redis_url import checked, shown


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("redis://localhost", "redis://localhost"),
        ("redis://10.0.0.1:6380/3", "redis://10.0.0.1:6380/3"),
        ("redis://[::1]:6380", "redis://[::1]:6380"),
        ("redis://:s3cret@redis.example/0", "redis://redis.example/0"),
        ("rediss://user:s3cret%40@redis.example:6380/1?ssl_ca_certs=/ca.pem", "rediss://redis.example:6380/1"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("unix:///run/redis.sock?db=2&password=s3cret", "unix:///run/redis.sock"),
        ("unix://user:s3cret@/run/redis.sock", "unix:///run/redis.sock"),
    ],
)
def test_the_forms_are_taken_and_shown_without_secrets(url: str, seen: str) -> None:
    assert checked(url) == url
    assert shown(url) == seen


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "begins with none of"),
        ("redis://:s3cret@localhost?decode_responses=True", "its option decode_responses is not yours to choose"),
        ("s3cret", "begins with none of"),
        ("localhost:6379", "begins with none of"),
        ("http://:s3cret@localhost", "begins with none of redis://, rediss:// and unix://"),
        ("redis:localhost", "names no host"),
        ("redis://:s3cret@", "names no host"),
        ("redis://:s3cret@localhost:port", "cannot be read"),
        ("redis://:s3cret@[::1", "cannot be read"),
        ("redis://:s3cret@localhost:0", "port 0"),
        ("redis://:s3cret@localhost/s3cret", "not the number of a database"),
        ("unix://s3cret", "names no socket"),
        ("unix://run/s3cret.sock", "names no socket"),
        ("unix:///", "names no socket"),
    ],
)
def test_what_is_none_of_the_forms_is_refused_without_showing_it(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        checked(url)
    assert "s3cret" not in str(refused.value)
    assert "allowed: redis://" in str(refused.value)
    assert refused.value.__cause__ is None
