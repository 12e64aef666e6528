//! The web UI: files that are embedded in the program. See docs/decisions/0085.

use std::collections::HashMap;
use std::sync::LazyLock;

use axum::Extension;
use axum::extract::Path;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::Response;
use muster_types::Error;

use crate::error::ApiResult;
use crate::incoming::Incoming;
use crate::response::see_other;
use crate::static_file::StaticFile;

/// The path below `/ui/` and the content of every file.
static FILES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/ui_files.rs"));

static FILES_BY_PATH: LazyLock<HashMap<&str, StaticFile>> =
    LazyLock::new(|| FILES.iter().map(|(path, content)| (*path, new_file(path, content))).collect());

/// The content security policy of the UI: only files of this server, no inline code. Screenshots are shown as `blob:`, the
/// cursors of consoles as `data:`. The hash is that of the import map.
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self' 'sha256-B4U7zOXZSIpp1SR4Y5PX7JDA2/ynfbfGb7ZY/NjFpbM='; style-src 'self'; \
     img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
);
fn new_file(path: &str, content: &'static [u8]) -> StaticFile {
    let content_type = match path.rsplit_once('.').map_or("", |(_, extension)| extension) {
        "html" => "text/html; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "svg" => "image/svg+xml",
        _ => "text/javascript; charset=utf-8",
    };
    StaticFile::new(content_type, content)
}

fn respond(file: &StaticFile, headers: &HeaderMap) -> Response {
    let mut response = file.respond(headers);
    response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, POLICY);
    response
}

/// Returns the page of the web UI.
#[utoipa::path(get, path = "/ui", tag = "root", responses(
    (status = 200, description = "HTML page.", content_type = "text/html", body = String),
    (status = 303, description = "The page is at `/ui/`, with a slash.", content_type = "text/html", body = String)))]
pub(crate) async fn page(Extension(incoming): Extension<Incoming>, headers: HeaderMap) -> Response {
    if !incoming.trailing_slash {
        // The page refers to its files by relative paths.
        return see_other("ui/");
    }
    respond(&FILES_BY_PATH["index.html"], &headers)
}

/// Returns a file of the web UI.
#[utoipa::path(get, path = "/ui/{*file}", tag = "root", params(("file" = String, Path)), responses(
    (status = 200, description = "The file.", content((String = "text/javascript"), (String = "text/css"))),
    (status = 304, description = "The file has not changed."),
    (status = 404, description = "No such file.")))]
pub(crate) async fn file(Path(file): Path<String>, headers: HeaderMap) -> ApiResult<Response> {
    match FILES_BY_PATH.get(file.as_str()) {
        Some(found) => Ok(respond(found, &headers)),
        None => Err(Error::not_found("file").into()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use aws_lc_rs::digest::{SHA256, digest};
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;

    use super::*;

    #[test]
    fn policy_allows_the_import_map_and_no_other_inline_code() {
        let page = std::str::from_utf8(FILES_BY_PATH["index.html"].bytes()).unwrap();
        let (_, rest) = page.split_once("<script type=\"importmap\">").unwrap();
        let (map, _) = rest.split_once("</script>").unwrap();
        let hash = STANDARD.encode(digest(&SHA256, map.as_bytes()));
        assert!(POLICY.to_str().unwrap().contains(&format!("'sha256-{hash}'")), "{hash}");
        assert!(!POLICY.to_str().unwrap().contains("unsafe"));
        for inline in ["<style", " style=", " onclick=", "<script>"] {
            assert!(!page.contains(inline), "{inline}");
        }
    }

    #[test]
    fn vendored_files_have_their_checksums() {
        let list = include_str!("../../../ui/vendor/SHA256SUMS");
        let mut listed = HashSet::new();
        for line in list.lines() {
            let (checksum, path) = line.split_once("  ").unwrap();
            listed.insert(path);
            // Licenses are not served.
            let Some(file) = FILES_BY_PATH.get(format!("vendor/{path}").as_str()) else {
                assert!(path.contains("LICENSE") || path.contains("AUTHORS"), "{path} is missing");
                continue;
            };
            assert_eq!(hex::encode(digest(&SHA256, file.bytes())), checksum, "{path}");
        }
        for path in FILES_BY_PATH.keys().filter_map(|path| path.strip_prefix("vendor/")) {
            assert!(listed.contains(path), "ui/vendor/SHA256SUMS does not list {path}");
        }
    }

    #[test]
    fn scripts_insert_no_markup() {
        for (path, content) in FILES.iter().filter(|(path, _)| !path.starts_with("vendor/")) {
            let text = std::str::from_utf8(content).unwrap();
            for risky in
                ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"]
            {
                assert!(!text.contains(risky), "{path} uses {risky}");
            }
        }
    }
}
