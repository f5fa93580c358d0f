"""The endpoints of collections, their documents and their search."""

from __future__ import annotations

from penstock.gateway.app.endpoint import Endpoint
from penstock.gateway.rag.collection_endpoints import CollectionEndpoints, CollectionRequest, PageQuery
from penstock.gateway.rag.document_endpoints import (
    DOCUMENT_FORM,
    DocumentEndpoints,
    DocumentRequest,
    DocumentsQuery,
    FileQuery,
)
from penstock.gateway.rag.schemas import SearchRequest

KNOWLEDGE = (
    Endpoint(
        "POST",
        "/v1/collections",
        CollectionEndpoints.create_collection,
        "Create a collection.",
        "Knowledge",
        CollectionRequest,
    ),
    Endpoint(
        "GET",
        "/v1/collections",
        CollectionEndpoints.list_collections,
        "List collections.",
        "Knowledge",
        query=PageQuery,
    ),
    Endpoint(
        "GET",
        "/v1/collections/{collection}",
        CollectionEndpoints.get_collection,
        "A collection and the progress of its documents.",
        "Knowledge",
    ),
    Endpoint(
        "DELETE",
        "/v1/collections/{collection}",
        CollectionEndpoints.delete_collection,
        "Delete a collection with its documents.",
        "Knowledge",
    ),
    Endpoint(
        "POST",
        "/v1/collections/{collection}/search",
        CollectionEndpoints.search_collection,
        "Search a collection.",
        "Knowledge",
        SearchRequest,
        serves_tokens=True,
    ),
    Endpoint(
        "POST",
        "/v1/collections/{collection}/documents",
        DocumentEndpoints.add_document,
        "Add a document.",
        "Knowledge",
        DocumentRequest,
        query=FileQuery,
        form=DOCUMENT_FORM,
    ),
    Endpoint(
        "GET",
        "/v1/collections/{collection}/documents",
        DocumentEndpoints.list_documents,
        "List the documents of a collection.",
        "Knowledge",
        query=DocumentsQuery,
    ),
    Endpoint(
        "GET",
        "/v1/collections/{collection}/documents/{document}",
        DocumentEndpoints.get_document,
        "A document.",
        "Knowledge",
    ),
    Endpoint(
        "PUT",
        "/v1/collections/{collection}/documents/{document}",
        DocumentEndpoints.put_document,
        "Add or replace a document.",
        "Knowledge",
        DocumentRequest,
        query=FileQuery,
        form=DOCUMENT_FORM,
    ),
    Endpoint(
        "DELETE",
        "/v1/collections/{collection}/documents/{document}",
        DocumentEndpoints.delete_document,
        "Delete a document.",
        "Knowledge",
    ),
    Endpoint(
        "GET",
        "/v1/collections/{collection}/documents/{document}/chunks",
        DocumentEndpoints.list_chunks,
        "The chunks of a document.",
        "Knowledge",
    ),
    Endpoint(
        "GET",
        "/v1/collections/{collection}/chunks/{chunk}",
        DocumentEndpoints.get_chunk,
        "A chunk, as citations name it.",
        "Knowledge",
    ),
)
