//! The documentation, as a web site. See docs/decisions/0099.

use std::collections::HashMap;
use std::sync::LazyLock;

use axum::Extension;
use axum::extract::Path;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;

use crate::incoming::Incoming;
use crate::response::{content, see_other};
use crate::static_file::StaticFile;

/// The path below `/docs/` and the content of every file. Rendered when the first one is requested.
static FILES: LazyLock<HashMap<String, StaticFile>> = LazyLock::new(|| {
    let files = muster_site::files().into_iter();
    files.map(|file| (file.path, StaticFile::new(file.content_type, file.content.into_owned()))).collect()
});

const INDEX: &str = "index.html";

/// The content security policy of the documentation: no scripts, and only styles and images of this server.
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; style-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
);

/// Returns the first page of the documentation.
#[utoipa::path(get, path = "/docs", tag = "root", responses(
    (status = 200, description = "HTML page.", content_type = "text/html", body = String),
    (status = 303, description = "The page is at `/docs/`, with a slash.", content_type = "text/html", body = String),
    (status = 304, description = "The page has not changed.")))]
pub(crate) async fn index(Extension(incoming): Extension<Incoming>, headers: HeaderMap) -> Response {
    if !incoming.trailing_slash {
        // The page refers to other pages by relative paths.
        return see_other("docs/");
    }
    respond(INDEX, &headers)
}

/// Returns a page or an image of the documentation.
#[utoipa::path(get, path = "/docs/{*file}", tag = "root", params(("file" = String, Path)), responses(
    (status = 200, description = "The page or image.",
     content((String = "text/html"), (String = "text/css"), (String = "image/svg+xml"), (String = "image/png"))),
    (status = 304, description = "The file has not changed."),
    (status = 404, description = "No such page. The response is the list of pages.", content_type = "text/html", body = String)))]
pub(crate) async fn file(
    Extension(incoming): Extension<Incoming>,
    Path(file): Path<String>,
    headers: HeaderMap,
) -> Response {
    // Browsers resolve the links of the page from the path that they have requested.
    respond(&if incoming.trailing_slash { file + "/" } else { file }, &headers)
}

fn respond(path: &str, headers: &HeaderMap) -> Response {
    let mut response = match FILES.get(path) {
        Some(file) => file.respond(headers),
        None => {
            let mut response = content("text/html; charset=utf-8", muster_site::not_found(path));
            *response.status_mut() = StatusCode::NOT_FOUND;
            response
        }
    };
    response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, POLICY);
    response
}
