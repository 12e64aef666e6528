//! The OpenAPI document and a page that displays it without internet access.

use std::sync::LazyLock;

use axum::Extension;
use axum::extract::Path;
use axum::http::HeaderMap;
use axum::response::Response;
use muster_types::Error;

use crate::document::Document;
use crate::error::ApiResult;
use crate::static_file::StaticFile;

const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

static PAGE: LazyLock<StaticFile> = LazyLock::new(|| {
    StaticFile::new("text/html; charset=utf-8", include_str!("../../../ui/apidocs/index.html"))
});

static FILES: LazyLock<[(&str, StaticFile); 3]> = LazyLock::new(|| {
    let bundle = include_bytes!("../../../ui/apidocs/swagger-ui-bundle.js").as_slice();
    let style = include_bytes!("../../../ui/apidocs/swagger-ui.css").as_slice();
    let start = include_bytes!("../../../ui/apidocs/start.js").as_slice();
    [
        ("swagger-ui-bundle.js", StaticFile::new(JAVASCRIPT, bundle)),
        ("swagger-ui.css", StaticFile::new("text/css; charset=utf-8", style)),
        ("start.js", StaticFile::new(JAVASCRIPT, start)),
    ]
});

/// Returns this document.
#[utoipa::path(get, path = "/openapi.json", tag = "root", responses(
    (status = 200, description = "OpenAPI 3 document.", content_type = "application/json", body = Object),
    (status = 304, description = "The document has not changed.")))]
pub(crate) async fn document(Extension(document): Extension<Document>, headers: HeaderMap) -> Response {
    document.file().respond(&headers)
}

/// Returns a page that displays this document.
#[utoipa::path(get, path = "/apidocs", tag = "root", responses(
    (status = 200, description = "HTML page.", content_type = "text/html", body = String),
    (status = 304, description = "The page has not changed.")))]
pub(crate) async fn page(headers: HeaderMap) -> Response {
    PAGE.respond(&headers)
}

/// Returns a file of the page at `/apidocs`.
#[utoipa::path(get, path = "/apidocs/{file}", tag = "root", params(("file" = String, Path)), responses(
    (status = 200, description = "The file.", content((String = "text/javascript"), (String = "text/css"))),
    (status = 304, description = "The file has not changed."),
    (status = 404, description = "No such file.")))]
pub(crate) async fn file(Path(file): Path<String>, headers: HeaderMap) -> ApiResult<Response> {
    match FILES.iter().find(|(name, _)| *name == file) {
        Some((_, found)) => Ok(found.respond(&headers)),
        None => Err(Error::not_found("file").into()),
    }
}
