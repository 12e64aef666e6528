//! The API's description: an OpenAPI document made from the code, and a page that shows it without the
//! internet.

use axum::Extension;
use axum::body::Bytes;
use axum::extract::Path;
use axum::response::{IntoResponse, Response};
use muster_types::Error;
use muster_types::settings::Settings;
use utoipa::openapi::{OpenApi, Server};

use crate::error::ApiError;
use crate::response::text;

/// The OpenAPI document, written once.
#[derive(Debug, Clone)]
pub(crate) struct Document(Bytes);

impl Document {
    pub(crate) fn new(mut document: OpenApi, settings: &Settings) -> Self {
        let defaults =
            settings.api_advertised_host == "localhost" && settings.api_advertised_base_path == "/";
        let servers = settings.api_advertised_http_schemes.split_whitespace().map(|scheme| {
            let path = settings.api_advertised_base_path.trim_end_matches('/');
            Server::new(format!("{scheme}://{}{path}", settings.api_advertised_host))
        });
        // Relative to where the document is, unless the operator says otherwise.
        document.servers = Some(if defaults { vec![Server::new("/")] } else { servers.collect() });
        Self(Bytes::from(document.to_pretty_json().unwrap_or_default()))
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

/// This document.
#[utoipa::path(get, path = "/openapi.json", tag = "root", responses((status = 200, description = "OpenAPI 3 document", content_type = "application/json", body = Object)))]
pub(crate) async fn document(Extension(document): Extension<Document>) -> Response {
    text("application/json", document.0)
}

/// A page that shows this document.
#[utoipa::path(get, path = "/apidocs", tag = "root", responses((status = 200, description = "HTML page", content_type = "text/html", body = String)))]
pub(crate) async fn page() -> Response {
    text("text/html; charset=utf-8", include_str!("../../ui/apidocs/index.html"))
}

/// A file of that page.
#[utoipa::path(get, path = "/apidocs/{file}", tag = "root", params(("file" = String, Path)), responses(
    (status = 200, description = "the file", content_type = "text/plain", body = String),
    (status = 404, description = "no such file")))]
pub(crate) async fn file(Path(file): Path<String>) -> Response {
    match file.as_str() {
        "swagger-ui-bundle.js" => text(
            "text/javascript; charset=utf-8",
            include_bytes!("../../ui/apidocs/swagger-ui-bundle.js").as_slice(),
        ),
        "swagger-ui.css" => {
            text("text/css; charset=utf-8", include_bytes!("../../ui/apidocs/swagger-ui.css").as_slice())
        }
        "start.js" => text("text/javascript; charset=utf-8", include_str!("../../ui/apidocs/start.js")),
        _ => ApiError(Error::not_found("file")).into_response(),
    }
}
