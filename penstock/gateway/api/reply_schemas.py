"""The shapes of replies, as JSON schemas by the name of the handler. The fields listed here are always present; an
object may have more."""

from __future__ import annotations

from typing import Any

from penstock.gateway.app.openapi import Replies

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
ANY_OBJECT: Schema = {"type": "object"}
ANY: Schema = {}


def obj(**properties: Schema) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def maybe(schema: Schema) -> Schema:
    return either(schema, {"type": "null"})


def many(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def word(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def listing(item: Schema, **more: Schema) -> Schema:
    return obj(object=word("list"), data=many(item), **more)


_USAGE = obj(prompt_tokens=INTEGER, completion_tokens=INTEGER, total_tokens=INTEGER)
_HEAD = {"id": STRING, "created": INTEGER, "model": STRING, "usage": _USAGE}
_MESSAGE = obj(role=word("assistant"), content=maybe(STRING))
_MODEL = obj(
    id=STRING, object=word("model"), created=INTEGER, owned_by=STRING, aliases=many(STRING),
    context_window=maybe(INTEGER), limits=maybe(ANY_OBJECT), ready=BOOLEAN, state=STRING, capabilities=ANY_OBJECT,
    pricing=ANY_OBJECT,
)  # fmt: skip
_MODEL["properties"]["sampling"] = ANY_OBJECT  # not of models that sample nothing, or elsewhere
_ADAPTER = obj(id=STRING, object=word("adapter"), model=STRING)
_TENANT = obj(id=STRING, object=word("tenant"), name=STRING, tier=STRING)
_KEY = obj(id=STRING, object=word("key"), tenant=STRING, scopes=many(STRING))
_STATE = obj(id=STRING, object=word("model"), state=STRING)
_RESPONSE = obj(id=STRING, object=word("response"), status=STRING, model=STRING, output=many(ANY_OBJECT))

_PLAN = obj(
    id=STRING, object=word("model.plan"), at=NUMBER, replicas=INTEGER, device=STRING, slots=maybe(INTEGER),
    kv_tokens=maybe(INTEGER), price_per_hour=maybe(NUMBER), price_source=STRING, headroom=maybe(ANY_OBJECT),
    mix=maybe(ANY_OBJECT), full=obj(outlook=STRING, in_s=maybe(NUMBER)), cost=ANY_OBJECT, next_replica=ANY_OBJECT,
    autoscaler=ANY_OBJECT, history=many(ANY_OBJECT),
)  # fmt: skip
_WHAT_IF = obj(
    object=word("plan"), model=ANY_OBJECT, workload=ANY_OBJECT, best=maybe(ANY_OBJECT), why_none=STRING,
    candidates=many(ANY_OBJECT), rejected=many(ANY_OBJECT), assumptions=many(ANY_OBJECT),
)  # fmt: skip
_FILE = obj(
    id=STRING, object=word("file"), bytes=INTEGER, created_at=INTEGER, expires_at=maybe(INTEGER), filename=STRING,
    purpose=STRING, status=STRING,
)  # fmt: skip
_UPLOAD = obj(
    id=STRING, object=word("upload"), bytes=INTEGER, created_at=INTEGER, expires_at=INTEGER, filename=STRING,
    purpose=STRING, status=word("pending", "completed", "cancelled", "expired"), file=maybe(_FILE),
)  # fmt: skip
_BATCH = obj(
    id=STRING, object=word("batch"), endpoint=STRING, input_file_id=STRING, completion_window=STRING, status=STRING,
    created_at=INTEGER, expires_at=maybe(INTEGER), errors=maybe(ANY_OBJECT), output_file_id=maybe(STRING),
    error_file_id=maybe(STRING), metadata=ANY_OBJECT,
    request_counts=obj(total=INTEGER, completed=INTEGER, failed=INTEGER),
    usage=maybe(obj(input_tokens=INTEGER, output_tokens=INTEGER, total_tokens=INTEGER)),
)  # fmt: skip
_MESSAGE_BATCH = obj(
    id=STRING, type=word("message_batch"), processing_status=word("in_progress", "canceling", "ended"),
    request_counts=obj(processing=INTEGER, succeeded=INTEGER, errored=INTEGER, canceled=INTEGER, expired=INTEGER),
    created_at=STRING, expires_at=STRING, ended_at=maybe(STRING), cancel_initiated_at=maybe(STRING),
    archived_at=maybe(STRING), results_url=maybe(STRING),
)  # fmt: skip
_WEBHOOK = obj(
    id=STRING, object=word("webhook_endpoint"), created_at=INTEGER, updated_at=INTEGER, name=STRING, url=STRING,
    event_types=many(STRING), signing_secret_hint=STRING,
)  # fmt: skip
_PAGE = {"first_id": maybe(STRING), "last_id": maybe(STRING), "has_more": BOOLEAN}
_VOTE = obj(object=word("feedback"), response_id=STRING, rating=word("up", "down"), model=STRING, route=STRING)

_COLLECTION = obj(
    id=STRING, object=word("collection"), name=STRING, description=STRING, metadata=ANY_OBJECT, embedding_model=STRING,
    dimensions=INTEGER, chunk_tokens=INTEGER, overlap_tokens=INTEGER, created_at=INTEGER,
)  # fmt: skip
_DOCUMENT = obj(
    id=STRING, object=word("collection.document"), collection=STRING, name=STRING, url=maybe(STRING), media_type=STRING,
    bytes=INTEGER, sha256=STRING, metadata=ANY_OBJECT, status=STRING, error=maybe(STRING), chunks=INTEGER,
)  # fmt: skip
_CHUNK = obj(
    id=STRING, object=word("collection.chunk"), document_id=STRING, document=STRING, text=STRING, tokens=INTEGER
)
_FILE_COUNTS = obj(in_progress=INTEGER, completed=INTEGER, failed=INTEGER, cancelled=INTEGER, total=INTEGER)
_VECTOR_STORE = obj(
    id=STRING, object=word("vector_store"), created_at=INTEGER, name=STRING, usage_bytes=INTEGER,
    file_counts=_FILE_COUNTS, status=word("in_progress", "completed", "expired"), expires_after=maybe(ANY_OBJECT),
    expires_at=maybe(INTEGER), last_active_at=INTEGER, metadata=ANY_OBJECT,
)  # fmt: skip
_STORE_FILE = obj(
    id=STRING, object=word("vector_store.file"), created_at=INTEGER, vector_store_id=STRING, usage_bytes=INTEGER,
    status=word("in_progress", "completed", "failed", "cancelled"), last_error=maybe(obj(code=STRING, message=STRING)),
    attributes=ANY_OBJECT, chunking_strategy=ANY_OBJECT,
)  # fmt: skip
_FILE_BATCH = obj(
    id=STRING, object=word("vector_store.files_batch"), created_at=INTEGER, vector_store_id=STRING,
    status=word("in_progress", "completed", "failed", "cancelled"), file_counts=_FILE_COUNTS,
)  # fmt: skip
_PARTS_OF_TEXT = obj(object=STRING, data=many(ANY_OBJECT), has_more=BOOLEAN, next_page=maybe(STRING))
_CONVERSATION = obj(id=STRING, object=word("conversation"))
_ERASED = obj(model=STRING, replica=STRING, blocks=INTEGER, failed=INTEGER)
_CACHE = obj(object=word("cache"), answers=INTEGER, bytes=INTEGER, ttl_s=NUMBER)
_REPLICAS = obj(id=STRING, object=word("model"), replicas=many(ANY_OBJECT))
_DELETED = obj(id=STRING, object=STRING, deleted=BOOLEAN)

_OLLAMA_MODEL = obj(name=STRING, model=STRING, modified_at=STRING, size=INTEGER, digest=STRING, details=ANY_OBJECT)

_SCHEMAS: dict[str, Schema] = {
    "chat_completions": obj(
        object=word("chat.completion"),
        choices=many(obj(index=INTEGER, message=_MESSAGE, finish_reason=STRING)),
        **_HEAD,
    ),
    "list_chat_completions": listing(ANY_OBJECT, **_PAGE),
    "get_chat_completion": obj(id=STRING, object=word("chat.completion")),
    "update_chat_completion": obj(id=STRING, object=word("chat.completion")),
    "delete_chat_completion": _DELETED,
    "list_chat_completion_messages": listing(ANY_OBJECT, **_PAGE),
    "completions": obj(
        object=word("text_completion"), choices=many(obj(index=INTEGER, text=STRING, finish_reason=STRING)), **_HEAD
    ),
    "create_response": _RESPONSE,
    "get_response": _RESPONSE,
    "delete_response": obj(id=STRING, object=STRING, deleted=BOOLEAN),
    "create_message": obj(
        id=STRING,
        type=word("message"),
        role=word("assistant"),
        model=STRING,
        content=many(ANY_OBJECT),
        stop_reason=maybe(STRING),
        usage=obj(input_tokens=INTEGER, output_tokens=INTEGER),
    ),
    "compact_response": obj(
        id=STRING,
        object=word("response.compaction"),
        created_at=INTEGER,
        output=many(ANY_OBJECT),
        usage=ANY_OBJECT,
    ),
    "count_input_tokens": obj(object=word("response.input_tokens"), input_tokens=INTEGER),
    "list_input_items": listing(ANY_OBJECT, **_PAGE),
    "cancel_response": _RESPONSE,
    "count_tokens": obj(input_tokens=INTEGER),
    "embeddings": listing(ANY_OBJECT, model=STRING, usage=ANY_OBJECT),
    "rerank": obj(id=STRING, object=word("list"), model=STRING, results=many(ANY_OBJECT), usage=ANY_OBJECT),
    "score": listing(obj(index=INTEGER, object=word("score"), score=NUMBER), id=STRING, model=STRING, usage=_USAGE),
    "pooling": listing(obj(index=INTEGER, object=word("pooling"), data=ANY), id=STRING, model=STRING, usage=_USAGE),
    "moderations": obj(
        id=STRING,
        model=STRING,
        results=many(obj(flagged=BOOLEAN, categories=ANY_OBJECT, category_scores=ANY_OBJECT)),
    ),
    "list_conversations": listing(_CONVERSATION),
    "get_conversation": _CONVERSATION,
    "delete_conversation": _DELETED,
    "create_conversation": _CONVERSATION,
    "update_conversation": _CONVERSATION,
    "create_conversation_items": listing(ANY_OBJECT, **_PAGE),
    "list_conversation_items": listing(ANY_OBJECT, **_PAGE),
    "get_conversation_item": obj(id=STRING, type=STRING),
    "delete_conversation_item": _CONVERSATION,
    "create_collection": _COLLECTION,
    "list_collections": listing(_COLLECTION),
    "get_collection": _COLLECTION,
    "delete_collection": _DELETED,
    "search_collection": listing(ANY_OBJECT, collection=STRING, timings_ms=ANY_OBJECT),
    "add_document": _DOCUMENT,
    "put_document": _DOCUMENT,
    "list_documents": listing(_DOCUMENT),
    "get_document": _DOCUMENT,
    "delete_document": _DELETED,
    "list_chunks": listing(_CHUNK),
    "get_chunk": _CHUNK,
    "create_vector_store": _VECTOR_STORE,
    "list_vector_stores": listing(_VECTOR_STORE, **_PAGE),
    "get_vector_store": _VECTOR_STORE,
    "change_vector_store": _VECTOR_STORE,
    "delete_vector_store": _DELETED,
    "search_vector_store": _PARTS_OF_TEXT,
    "add_store_file": _STORE_FILE,
    "list_store_files": listing(_STORE_FILE, **_PAGE),
    "get_store_file": _STORE_FILE,
    "change_store_file": _STORE_FILE,
    "remove_store_file": _DELETED,
    "store_file_content": _PARTS_OF_TEXT,
    "create_file_batch": _FILE_BATCH,
    "get_file_batch": _FILE_BATCH,
    "cancel_file_batch": _FILE_BATCH,
    "list_batch_files": listing(_STORE_FILE, **_PAGE),
    "show_cache": _CACHE,
    "show_all_caches": _CACHE,
    "evict_cache": obj(object=word("cache.evicted"), answers=INTEGER),
    "evict_all_caches": obj(object=word("cache.evicted"), answers=INTEGER),
    "list_traces": listing(ANY_OBJECT),
    "get_trace": ANY_OBJECT,
    "list_tools": listing(ANY_OBJECT),
    "list_tool_servers": listing(obj(name=STRING)),
    "register_tool_server": obj(name=STRING, functions=many(ANY_OBJECT)),
    "remove_tool_server": obj(name=STRING, object=STRING, deleted=BOOLEAN),
    "list_replicas": listing(ANY_OBJECT, autoscale=many(ANY_OBJECT)),
    "list_autoscale": listing(ANY_OBJECT),
    "set_autoscale": obj(id=STRING, object=word("model"), min=maybe(INTEGER), max=maybe(INTEGER)),
    "notice_replica": _REPLICAS,
    "what_if": _WHAT_IF,
    "show_plan": listing(_PLAN, devices=many(obj(id=STRING, title=STRING, kind=STRING, price_per_hour=maybe(NUMBER)))),
    "scale_model": _REPLICAS,
    "restart_model": _REPLICAS,
    "drain_replica": _REPLICAS,
    "show_fleet": obj(
        object=word("fleet"),
        name=STRING,
        controller=STRING,
        term=INTEGER,
        machines=many(ANY_OBJECT),
        gateways=many(ANY_OBJECT),
        engines=many(ANY_OBJECT),
        models=many(ANY_OBJECT),
    ),
    "drain_machine": obj(id=STRING, object=word("machine"), state=STRING),
    "drain_server": obj(object=word("server"), state=STRING),
    "create_file": _FILE,
    "get_file": _FILE,
    "list_files": listing(_FILE, **_PAGE),
    "delete_file": obj(id=STRING, object=STRING, deleted=BOOLEAN),
    "file_content": {
        "application/jsonl": {"schema": STRING},
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
    },
    "create_upload": _UPLOAD,
    "add_upload_part": obj(id=STRING, object=word("upload.part"), created_at=INTEGER, upload_id=STRING),
    "complete_upload": _UPLOAD,
    "cancel_upload": _UPLOAD,
    "create_webhook_endpoint": _WEBHOOK,
    "get_webhook_endpoint": _WEBHOOK,
    "update_webhook_endpoint": _WEBHOOK,
    "rotate_webhook_secret": _WEBHOOK,
    "list_webhook_endpoints": listing(_WEBHOOK, **_PAGE),
    "delete_webhook_endpoint": obj(id=STRING, object=word("webhook_endpoint.deleted"), deleted=BOOLEAN),
    "test_webhook_endpoint": obj(
        object=word("webhook_endpoint.test"),
        webhook_endpoint_id=STRING,
        event_type=STRING,
        status_code=INTEGER,
        success=BOOLEAN,
    ),
    "list_webhook_event_types": listing(STRING),
    "create_batch": _BATCH,
    "get_batch": _BATCH,
    "cancel_batch": _BATCH,
    "list_batches": listing(_BATCH, **_PAGE),
    "create_message_batch": _MESSAGE_BATCH,
    "get_message_batch": _MESSAGE_BATCH,
    "cancel_message_batch": _MESSAGE_BATCH,
    "list_message_batches": obj(data=many(_MESSAGE_BATCH), **_PAGE),
    "delete_message_batch": obj(id=STRING, type=word("message_batch_deleted")),
    "message_batch_results": {"application/x-jsonl": {"schema": STRING}},
    "give_feedback": _VOTE,
    "list_feedback": listing(_VOTE, totals=many(ANY_OBJECT)),
    "list_models": listing(_MODEL),
    "get_model": _MODEL,
    "tokenize": either(
        obj(
            object=STRING,
            model=STRING,
            tokens=many(INTEGER),
            count=INTEGER,
            max_model_len=maybe(INTEGER),
            fits=BOOLEAN,
            estimated_cost=obj(input=NUMBER, output=NUMBER, total=NUMBER),
        ),
        obj(tokens=many(either(INTEGER, obj(id=INTEGER, piece=either(STRING, many(INTEGER)))))),
        many(obj(id=INTEGER, text=STRING, start=INTEGER, stop=INTEGER)),
    ),
    "detect": obj(
        object=word("watermark.detection"),
        model=STRING,
        verdict=STRING,
        p_value=NUMBER,
        threshold=NUMBER,
        tokens=INTEGER,
        scored_tokens=INTEGER,
        passage=maybe(STRING),
    ),
    "detokenize": obj(object=STRING, model=STRING, text=STRING, prompt=STRING, count=INTEGER),
    "tokenizer_info": obj(
        object=STRING,
        model=STRING,
        bos_token=maybe(STRING),
        eos_token=maybe(STRING),
        pad_token=maybe(STRING),
        chat_template=maybe(STRING),
        vocab_size=INTEGER,
        model_max_length=maybe(INTEGER),
    ),
    "list_adapters": listing(_ADAPTER),
    "load_adapter": _ADAPTER,
    "pin_adapter": _ADAPTER,
    "delete_model": obj(id=STRING, object=STRING, deleted=BOOLEAN),
    "unload_adapter": obj(id=STRING, object=STRING, deleted=BOOLEAN),
    "erase_kv": obj(object=word("kv.erased"), tenant=STRING, shared=BOOLEAN, complete=BOOLEAN, data=many(_ERASED)),
    "sleep_model": _STATE,
    "wake_model": _STATE,
    "usage": listing(ANY_OBJECT, by=many(STRING)),
    "list_requests": listing(ANY_OBJECT),
    "list_audit": listing(ANY_OBJECT),
    "list_own_requests": listing(ANY_OBJECT),
    "list_own_keys": listing(_KEY),
    "show_account": obj(
        object=word("account"),
        tenant=STRING,
        user=maybe(STRING),
        key=maybe(STRING),
        scopes=many(STRING),
        tier=maybe(STRING),
        allowed=maybe(ANY_OBJECT),
        used=many(ANY_OBJECT),
        spent=obj(today=NUMBER, month=NUMBER),
    ),
    "list_tenants": listing(_TENANT),
    "create_tenant": _TENANT,
    "change_tenant": _TENANT,
    "list_keys": listing(_KEY),
    "create_key": {**_KEY, "required": [*_KEY["required"], "key"], "properties": {**_KEY["properties"], "key": STRING}},
    "revoke_key": obj(id=STRING, object=STRING, revoked=BOOLEAN),
    "ollama_chat": obj(model=STRING, created_at=STRING, message=ANY_OBJECT, done=BOOLEAN),
    "ollama_generate": obj(model=STRING, created_at=STRING, response=STRING, done=BOOLEAN),
    "ollama_embed": obj(model=STRING, embeddings=many(many(NUMBER))),
    "ollama_embeddings": obj(embedding=many(NUMBER)),
    "ollama_tags": obj(models=many(_OLLAMA_MODEL)),
    "ollama_ps": obj(models=many(ANY_OBJECT)),
    "ollama_show": obj(details=ANY_OBJECT, model_info=ANY_OBJECT, capabilities=many(STRING)),
    "ollama_version": obj(version=STRING),
    "ollama_pull": obj(status=STRING),
    "llama_cpp_completion": ANY,
    "llama_cpp_infill": ANY,
    "llama_cpp_embedding": many(obj(index=INTEGER, embedding=many(ANY))),
    "apply_template": obj(prompt=STRING),
    "llama_cpp_props": obj(
        default_generation_settings=ANY_OBJECT,
        total_slots=INTEGER,
        model_path=STRING,
        chat_template=STRING,
        modalities=ANY_OBJECT,
        build_info=STRING,
        is_sleeping=BOOLEAN,
    ),
    "llama_cpp_slots": many(obj(id=INTEGER, n_ctx=maybe(INTEGER), is_processing=BOOLEAN)),
    "llama_cpp_lora_adapters": many(obj(id=INTEGER, path=STRING, scale=NUMBER)),
    "tgi_root": many(obj(generated_text=STRING)),
    "tgi_generate_stream": {"text/event-stream": {}},
    "tgi_info": obj(model_id=STRING, max_input_tokens=INTEGER, max_total_tokens=INTEGER, version=STRING),
    "generate": ANY,
    "sglang_model_info": obj(model_path=STRING, tokenizer_path=STRING, is_generation=BOOLEAN),
    "root": {"text/plain": {"schema": STRING}},
    "health": obj(status=word("ok", "unavailable")),
    "ping": obj(status=word("ok", "unavailable")),
    "version": obj(version=STRING),
    "live": obj(status=STRING, models=ANY_OBJECT),
    "ready": obj(status=STRING, checks=ANY_OBJECT, models=ANY_OBJECT),
    "metrics": {"text/plain": {"schema": STRING}},
}

REPLIES = Replies(
    _SCHEMAS,
    streams=frozenset(
        (
            *("chat_completions", "completions", "create_response", "create_message"),
            *("llama_cpp_completion", "llama_cpp_infill", "generate", "tgi_root"),
        )
    ),
    records=frozenset(("ollama_chat", "ollama_generate", "ollama_pull")),
    accepted=frozenset(("drain_server", "drain_machine")),
)
