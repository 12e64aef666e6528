//! The OpenAPI document and a page that displays it without internet access.

use axum::Extension;
use axum::extract::Path;
use axum::response::Response;
use muster_types::Error;

use crate::document::Document;
use crate::error::ApiResult;
use crate::response::content;

const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

/// Returns this document.
#[utoipa::path(get, path = "/openapi.json", tag = "root", responses(
    (status = 200, description = "OpenAPI 3 document.", content_type = "application/json", body = Object)))]
pub(crate) async fn document(Extension(document): Extension<Document>) -> Response {
    content("application/json", document.bytes())
}

/// Returns a page that displays this document.
#[utoipa::path(get, path = "/apidocs", tag = "root", responses(
    (status = 200, description = "HTML page.", content_type = "text/html", body = String)))]
pub(crate) async fn page() -> Response {
    content("text/html; charset=utf-8", include_str!("../../../ui/apidocs/index.html"))
}

/// Returns a file of the page at `/apidocs`.
#[utoipa::path(get, path = "/apidocs/{file}", tag = "root", params(("file" = String, Path)), responses(
    (status = 200, description = "The file.", content((String = "text/javascript"), (String = "text/css"))),
    (status = 404, description = "No such file.")))]
pub(crate) async fn file(Path(file): Path<String>) -> ApiResult<Response> {
    match file.as_str() {
        "swagger-ui-bundle.js" => {
            Ok(content(JAVASCRIPT, include_bytes!("../../../ui/apidocs/swagger-ui-bundle.js").as_slice()))
        }
        "swagger-ui.css" => Ok(content(
            "text/css; charset=utf-8",
            include_bytes!("../../../ui/apidocs/swagger-ui.css").as_slice(),
        )),
        "start.js" => Ok(content(JAVASCRIPT, include_str!("../../../ui/apidocs/start.js"))),
        _ => Err(Error::not_found("file").into()),
    }
}
