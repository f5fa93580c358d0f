"""`penstock keys` and `penstock tenants`: API keys and their owners. They change the store directly, whether or not a
server is running."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from penstock.cli.lists import Column, Output, show
from penstock.cli.options import ConfigFile, Settings

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.identity import ApiKey, IdentityStore, Tenant
    from penstock.identity.access import AllowList, AllowListChange
    from penstock.identity.allowance import Allowance, AllowanceChange
    from penstock.identity.labels import Demand

T = TypeVar("T")
OwnLimits = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=VALUE",
        help="A limit, such as daily_budget=5; the value none removes it. May be repeated.",
    ),
]

Require = Annotated[
    str | None,
    typer.Option(
        metavar="LABEL=VALUE,...",
        help="Labels that whatever gets the data must have, such as 'region=eu|ch, external=false'; none removes them.",
    ),
]

Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="KIND=NAMES",
        help="What may be used: models, adapters, remotes, collections or tools, as names and patterns with * between "
        "commas (models=small,auto); none: no list, so everything; nothing: nothing. May be repeated.",
    ),
]

keys = typer.Typer(
    name="keys",
    no_args_is_help=True,
    help="""
    Manage API keys. Until the first key is created, the server accepts every request, but only from this machine.

    Examples:

        penstock keys create

        penstock keys create --tenant acme --user ann --expires 30d

        penstock keys create --scope admin --scope metrics

        penstock keys create --tenant acme --limit requests_per_minute=30 --limit daily_budget=2.5

        penstock keys create --tenant acme --require external=false

        penstock keys update psk_1a2B3c4D --limit daily_budget=none

        penstock keys update psk_1a2B3c4D --allow models=small,auto --allow tools=

        penstock keys list

        penstock keys list -o json

        penstock keys revoke psk_1a2B3c4D
    """,
)
tenants = typer.Typer(
    name="tenants",
    no_args_is_help=True,
    help="""
    Manage tenants, the owners of keys, limits, budgets and data.

    Examples:

        penstock tenants create acme --tier enterprise

        penstock tenants update acme --tier free

        penstock tenants update acme --limit monthly_budget=500 --limit tokens_per_minute=none

        penstock tenants update acme --allow 'models=small,auto' --allow 'adapters=acme-*' --allow remotes=

        penstock tenants update acme --require 'region=eu, external=false'

        penstock tenants list
    """,
)

_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@keys.command("create")
def create_key(
    tenant: Annotated[str, typer.Option(help="Tenant of the key; created if it does not exist.")] = "default",
    user: Annotated[str, typer.Option(help="User of the key; by default each request names its user.")] = "",
    name: Annotated[str, typer.Option(help="A label for the key.")] = "",
    scope: Annotated[
        list[str] | None, typer.Option(help="inference, admin or metrics; may be repeated. Default: inference.")
    ] = None,
    expires: Annotated[str | None, typer.Option(help="Lifetime: 12h, 30d, 8w; by default unlimited.")] = None,
    limit: OwnLimits = None,
    require: Require = None,
    allow: Allow = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Create a key and print it. It is shown only once; the store keeps its prefix and a hash."""
    expires_at = None if expires is None else time.time() + _seconds(expires)
    limits, demand, lists = _limits(limit), _demand(require), _lists(allow)

    async def work(config: Config, store: IdentityStore) -> str:
        if not await store.tenants(tenant):
            await store.create_tenant(tenant)
        scopes: Any = tuple(scope or ("inference",))
        own: dict[str, Any] = {} if demand is None else {"require": demand}
        made, minted = await store.create_key(
            tenant,
            user=user,
            name=name,
            scopes=scopes,
            expires_at=expires_at,
            limits=_none().changed(limits),
            allow=_unlimited().changed(lists),
            **own,
        )
        await _noted(config, "key", made.id, tenant, demand)
        return minted.text

    text = _with_store(config_file, settings, work)
    typer.echo(text)
    typer.echo(
        "Store this key now: it cannot be shown again. Clients send it as their API key; the commands of Penstock take "
        "it from --key or $PENSTOCK_API_KEY.",
        err=True,
    )


@keys.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Option(help="Only keys of this tenant.")] = None,
    output: Output = "table",
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """List the keys, without their secrets."""

    async def work(config: Config, store: IdentityStore) -> list[ApiKey]:
        return await store.keys(tenant)

    columns: list[Column[ApiKey]] = [
        Column("key", lambda key: key.id, rank=0),
        Column("tenant", lambda key: key.tenant),
        Column("user", lambda key: key.user, rank=4),
        Column("name", lambda key: key.name, rank=2, fold=True),
        Column("scopes", lambda key: list(key.scopes), lambda key: " ".join(key.scopes), rank=3),
        Column("created", lambda key: key.created_at, lambda key: _when(key.created_at), rank=5),
        Column("state", _state, rank=0),
        Column("limits", lambda key: _as_json(key.limits), lambda key: _shown(key.limits), rank=6, fold=True),
        Column("require", lambda key: key.require.pairs, lambda key: str(key.require), rank=7, fold=True),
        Column("allow", lambda key: _as_json(key.allow), lambda key: _listed(key.allow), rank=8, fold=True),
    ]
    show(columns, _with_store(config_file, settings, work), output, empty="No keys: `penstock keys create` makes one.")


@keys.command("update")
def update_key(
    key: Annotated[str, typer.Argument(help="Prefix of the key, as shown by `penstock keys list`.")],
    name: Annotated[str | None, typer.Option(help="A label for the key.")] = None,
    limit: OwnLimits = None,
    require: Require = None,
    allow: Allow = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Change a key's label, limits or data rule. Running gateways apply it within seconds."""
    limits, demand, lists = _limits(limit), _demand(require), _lists(allow)

    async def work(config: Config, store: IdentityStore) -> ApiKey:
        changed = await store.update_key(key, name=name, limits=limits, require=demand, allow=lists)
        await _noted(config, "key", key, changed.tenant, demand)
        return changed

    changed = _with_store(config_file, settings, work)
    rule = f"; requires {changed.require}" if changed.require else ""
    may = f"; may use {_listed(changed.allow)}" if _listed(changed.allow) else ""
    typer.echo(f"{key}: {_shown(changed.limits) or 'no limits of its own'}{rule}{may}")


@keys.command("revoke")
def revoke_key(
    key: Annotated[str, typer.Argument(help="Prefix of the key, as shown by `penstock keys list`.")],
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Revoke a key for good. Running gateways apply it within seconds."""
    from penstock.errors import PenstockError

    async def work(config: Config, store: IdentityStore) -> bool:
        return await store.revoke_key(key)

    if not _with_store(config_file, settings, work):
        raise PenstockError(f"there is no active key {key}; see `penstock keys list`")
    typer.echo(f"{key} is revoked")


@tenants.command("create")
def create_tenant(
    id: Annotated[str, typer.Argument(help="Id of the tenant, used in keys and usage reports.")],
    name: Annotated[str, typer.Option(help="Display name.")] = "",
    tier: Annotated[str, typer.Option(help="Tier from the configuration; by default auth.default_tier.")] = "",
    limit: OwnLimits = None,
    require: Require = None,
    allow: Allow = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Create a tenant."""
    limits, demand, lists = _limits(limit), _demand(require), _lists(allow)

    async def work(config: Config, store: IdentityStore) -> None:
        _check_tier(config, tier)
        own: dict[str, Any] = {} if demand is None else {"require": demand}
        own["allow"] = _unlimited().changed(lists)
        await store.create_tenant(id, name=name, tier=tier, limits=_none().changed(limits), **own)
        await _noted(config, "tenant", id, id, demand)

    _with_store(config_file, settings, work)
    typer.echo(f"tenant {id} created; create its first key with: penstock keys create --tenant {id}")


@tenants.command("update")
def update_tenant(
    id: Annotated[str, typer.Argument(help="Id of the tenant.")],
    name: Annotated[str | None, typer.Option(help="Display name.")] = None,
    tier: Annotated[str | None, typer.Option(help="Tier from the configuration.")] = None,
    disable: Annotated[
        bool | None, typer.Option("--disable/--enable", help="Disable the tenant's keys, or enable them again.")
    ] = None,
    limit: OwnLimits = None,
    require: Require = None,
    allow: Allow = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Change a tenant's name, tier, limits or data rule, or disable it. Running gateways apply it within seconds."""
    limits, demand, lists = _limits(limit), _demand(require), _lists(allow)

    async def work(config: Config, store: IdentityStore) -> None:
        _check_tier(config, tier)
        await store.update_tenant(
            id, name=name, tier=tier, disabled=disable, limits=limits, require=demand, allow=lists
        )
        await _noted(config, "tenant", id, id, demand)

    _with_store(config_file, settings, work)
    typer.echo(f"tenant {id} changed")


@tenants.command("list")
def list_tenants(output: Output = "table", config_file: ConfigFile = None, settings: Settings = None) -> None:
    """List the tenants."""

    async def work(config: Config, store: IdentityStore) -> tuple[list[Tenant], str]:
        return await store.tenants(), config.auth.default_tier

    found, default = _with_store(config_file, settings, work)
    columns: list[Column[Tenant]] = [
        Column("tenant", lambda tenant: tenant.id, rank=0),
        Column("name", lambda tenant: tenant.name, rank=2, fold=True),
        Column("tier", lambda tenant: tenant.tier or default),
        Column("state", lambda tenant: "disabled" if tenant.disabled else "active", rank=0),
        Column("limits", lambda tenant: _as_json(tenant.limits), lambda tenant: _shown(tenant.limits), 3, fold=True),
        Column("require", lambda tenant: tenant.require.pairs, lambda tenant: str(tenant.require), 4, fold=True),
        Column("allow", lambda tenant: _as_json(tenant.allow), lambda tenant: _listed(tenant.allow), 5, fold=True),
    ]
    show(columns, found, output, empty="No tenants: `penstock tenants create NAME` makes one.")


def _with_store(
    config_file: Path | None, settings: list[str] | None, work: Callable[[Config, IdentityStore], Awaitable[T]]
) -> T:
    """Runs `work(config, store)` on the configured store."""
    import asyncio

    from penstock.cli.terminal import flags
    from penstock.config import load

    config = load(config_file, flags=flags(settings))

    async def run() -> T:
        async with _store(config) as store:
            return await work(config, store)

    return asyncio.run(run())


@asynccontextmanager
async def _store(config: Config) -> AsyncIterator[IdentityStore]:
    from penstock.identity import IdentityStore
    from penstock.storage import open_database

    database = await open_database(config.store.url)
    try:
        store = IdentityStore(database)
        await store.prepare()
        yield store
    finally:
        await database.close()


def _check_tier(config: Config, tier: str | None) -> None:
    from penstock.errors import ConfigError

    names = [entry.name for entry in config.tiers]
    if tier and tier not in names:
        raise ConfigError(f"there is no tier {tier!r}; the configuration has {', '.join(names)}")


def _limits(given: list[str] | None) -> AllowanceChange | None:
    import msgspec

    from penstock.errors import ConfigError
    from penstock.identity.allowance import AllowanceChange

    if not given:
        return None
    named: dict[str, str | None] = {}
    for entry in given:
        name, separator, value = entry.partition("=")
        if not separator:
            raise ConfigError(f"--limit {entry}: write NAME=VALUE, for example daily_budget=5, or NAME=none")
        named[name] = None if value == "none" else value
    try:
        return msgspec.convert(named, AllowanceChange, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--limit: {error}; allowed: {', '.join(AllowanceChange.__struct_fields__)}") from error


async def _noted(config: Config, kind: str, name: str, tenant: str, demand: Demand | None) -> None:
    """A rule that was changed is in the audit log."""
    import uuid

    from penstock.metering.audit import AuditEntry, AuditStore
    from penstock.storage import open_database

    if demand is None or not config.audit.enabled:
        return
    database = await open_database(config.store.url)
    try:
        store = AuditStore(database)
        await store.prepare()
        rule = f"requires {demand}" if demand else "requires nothing"
        entry = AuditEntry(
            id=uuid.uuid4().hex,
            timestamp=time.time(),
            tenant=tenant,
            path="command line",
            outcome="changed",
            kind=kind,
            name=name,
            rule=rule,
        )
        await store.write([entry])
    finally:
        await database.close()


def _demand(given: str | None) -> Demand | None:
    """None: not given; an empty one removes the demand."""
    from penstock.errors import ConfigError
    from penstock.identity.labels import NO_DEMAND, LabelError, parse_demand

    if given is None or given.strip() == "none":
        return None if given is None else NO_DEMAND
    try:
        return parse_demand(given, "")
    except LabelError as error:
        raise ConfigError(f"--require: {error}") from error


def _lists(given: list[str] | None) -> AllowListChange | None:
    import msgspec

    from penstock.errors import ConfigError
    from penstock.identity.access import AllowListChange

    if not given:
        return None
    named: dict[str, list[str] | None] = {}
    for entry in given:
        kind, separator, names = entry.partition("=")
        if not separator or kind not in AllowListChange.__struct_fields__:
            kinds = ", ".join(AllowListChange.__struct_fields__)
            raise ConfigError(f"--allow {entry}: write KIND=NAMES, for example models=small,auto; kinds are {kinds}")
        listed = None if names == "none" else [name.strip() for name in names.split(",") if name.strip()]
        earlier = named.get(kind)
        named[kind] = listed if listed is None or earlier is None else [*earlier, *listed]
    try:
        return msgspec.convert(named, AllowListChange)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--allow: {error}") from error


def _unlimited() -> AllowList:
    from penstock.identity.access import UNLIMITED

    return UNLIMITED


def _listed(allow: AllowList) -> str:
    return " ".join(f"{kind}={','.join(names) or 'nothing'}" for kind, names in _as_json(allow).items())


def _none() -> Allowance:
    from penstock.identity.allowance import NO_ALLOWANCE

    return NO_ALLOWANCE


def _shown(limits: Allowance) -> str:
    return " ".join(f"{name}={value:g}" for name, value in _as_json(limits).items())


def _as_json(limits: Allowance | AllowList) -> dict[str, Any]:
    import msgspec

    shown: dict[str, Any] = msgspec.to_builtins(limits)
    return shown


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _seconds(text: str) -> float:
    from penstock.errors import ConfigError

    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not number.isdigit():
        raise ConfigError(f"--expires {text}: write a number and m, h, d or w, for example 30d")
    return int(number) * _UNITS[unit]


def _state(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return "revoked"
    if key.expires_at is None:
        return "active"
    when = _when(key.expires_at)
    return f"until {when}" if key.usable(time.time()) else f"expired {when}"
