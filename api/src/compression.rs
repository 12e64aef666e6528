//! Compresses responses with gzip for clients that accept it. See docs/decisions/0086.

use std::io::{self, Write as _};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::{Body, Bytes, HttpBody};
use axum::http::header::{
    ACCEPT_ENCODING, ACCEPT_RANGES, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, VARY,
};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::response::Response;
use flate2::Compression;
use flate2::write::GzEncoder;
use hyper::body::{Frame, SizeHint};
use muster_control::auth::Caller;

/// The minimum size of a compressed body, in bytes. Smaller ones fit into a packet anyway.
const MIN_SIZE: u64 = 1 << 10;
/// The number of bytes that are compressed before other tasks may run.
const CHUNK_SIZE: usize = 64 << 10;
/// The types that are compressed. A stream of events is not among them, because compression would delay its messages.
const TYPES: &[&str] = &["application/json", "text/html", "text/css", "text/javascript", "image/svg+xml"];

/// Marks a response that may be compressed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Compressible;

/// The compressed body of a response, if it exists already.
#[derive(Debug, Clone)]
pub(crate) struct CompressedBody(pub(crate) Bytes);

/// Returns whether the response to a request may be compressed. The size of a compressed response shows whether two of its
/// texts are similar, so a secret must not be compressed together with text that another caller chose: not the response to a
/// change, which may contain a new secret, nor one with objects of several namespaces. `caller` is `None` for public routes,
/// whose responses contain no secrets.
pub(crate) fn is_allowed(method: &Method, caller: Option<&Caller>) -> bool {
    let sees_one_namespace =
        |caller: &Caller| !caller.is_system() && caller.trusting.as_ref().is_some_and(Vec::is_empty);
    *method == Method::GET && caller.is_none_or(sees_one_namespace)
}

/// Returns whether a client accepts gzip.
pub(crate) fn accepts_gzip(headers: &HeaderMap) -> bool {
    let values = headers.get_all(ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    let mut any = false;
    for item in values.flat_map(|value| value.split(',')) {
        let mut parts = item.split(';').map(str::trim);
        let coding = parts.next().unwrap_or_default();
        let quality = parts.find_map(|part| part.strip_prefix("q=").or_else(|| part.strip_prefix("Q=")));
        let accepted = quality.is_none_or(|quality| quality.parse().is_ok_and(|quality: f32| quality > 0.0));
        if coding.eq_ignore_ascii_case("gzip") {
            return accepted;
        }
        any |= coding == "*" && accepted;
    }
    any
}

/// Compresses a response that is marked as [`Compressible`], if that is useful and the client accepts it.
pub(crate) fn compress(accepts_gzip: bool, mut response: Response) -> Response {
    if response.extensions_mut().remove::<Compressible>().is_none() || !is_compressible(&response) {
        return response;
    }
    response.headers_mut().append(VARY, HeaderValue::from_static("accept-encoding"));
    if !accepts_gzip {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    parts.headers.remove(CONTENT_LENGTH);
    parts.headers.remove(ACCEPT_RANGES);
    parts.headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    // The compressed bytes are others, so the tag of the bytes becomes one of the content.
    if let Some(tag) =
        parts.headers.get(ETAG).and_then(|tag| tag.to_str().ok()).filter(|tag| tag.starts_with('"'))
        && let Ok(weak) = HeaderValue::try_from(format!("W/{tag}"))
    {
        parts.headers.insert(ETAG, weak);
    }
    let body = match parts.extensions.remove::<CompressedBody>() {
        Some(compressed) => Body::from(compressed.0),
        None => Body::new(GzipBody::new(body)),
    };
    Response::from_parts(parts, body)
}

fn is_compressible(response: &Response) -> bool {
    let headers = response.headers();
    let content_type = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let media_type = content_type.split(';').next().unwrap_or_default().trim_end();
    let size = response.body().size_hint();
    response.status() == StatusCode::OK
        && TYPES.contains(&media_type)
        && !headers.contains_key(CONTENT_ENCODING)
        && !headers.contains_key(CONTENT_RANGE)
        && size.exact().is_none_or(|size| size >= MIN_SIZE)
}

/// Compresses bytes.
pub(crate) fn gzip(bytes: &[u8]) -> io::Result<Bytes> {
    let mut encoder = GzEncoder::new(Vec::with_capacity(bytes.len() / 3), Compression::default());
    encoder.write_all(bytes)?;
    encoder.finish().map(Bytes::from)
}

/// A body that is compressed while it is sent.
struct GzipBody {
    body: Body,
    /// Data that is not compressed yet.
    pending: Bytes,
    /// `None` at the end.
    encoder: Option<GzEncoder<Vec<u8>>>,
}

impl GzipBody {
    fn new(body: Body) -> Self {
        let encoder = GzEncoder::new(Vec::new(), Compression::fast());
        Self { body, pending: Bytes::new(), encoder: Some(encoder) }
    }
}

impl HttpBody for GzipBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        loop {
            let Some(encoder) = &mut this.encoder else { return Poll::Ready(None) };
            if this.pending.is_empty() {
                match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                    Some(Ok(frame)) => {
                        this.pending = frame.into_data().unwrap_or_default();
                        continue;
                    }
                    Some(Err(error)) => {
                        this.encoder = None;
                        return Poll::Ready(Some(Err(error)));
                    }
                    None => {
                        let rest = this.encoder.take().map(GzEncoder::finish).transpose();
                        let rest = rest.map_err(axum::Error::new)?.unwrap_or_default();
                        return Poll::Ready(Some(Ok(Frame::data(Bytes::from(rest)))));
                    }
                }
            }
            let chunk = this.pending.split_to(this.pending.len().min(CHUNK_SIZE));
            encoder.write_all(&chunk).map_err(axum::Error::new)?;
            let compressed = std::mem::take(encoder.get_mut());
            if !compressed.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(Bytes::from(compressed)))));
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use http_body_util::BodyExt as _;

    use super::*;

    fn accepts(value: &'static str) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static(value));
        accepts_gzip(&headers)
    }

    #[test]
    fn respects_accept_encoding() {
        for value in ["gzip", "GZIP", "deflate, gzip;q=0.5", "br, *", "*;q=0.1", "gzip;q=1.000"] {
            assert!(accepts(value), "{value}");
        }
        for value in ["", "br", "identity", "gzip;q=0", "gzip; q=0.0, *", "*;q=0", "gzip;q=x", "gzipped"] {
            assert!(!accepts(value), "{value}");
        }
        assert!(!accepts_gzip(&HeaderMap::new()));
    }

    #[tokio::test]
    async fn compresses_a_body_of_several_frames() {
        let frames: Vec<Bytes> = (0..5u8).map(|n| Bytes::from(vec![b'a' + n; 100_000])).collect();
        let text = frames.concat();
        let stream = futures_util::stream::iter(frames.into_iter().map(Ok::<_, axum::Error>));
        let body = GzipBody::new(Body::from_stream(stream));
        let compressed = body.collect().await.unwrap().to_bytes();
        assert!(compressed.len() < 10_000, "{}", compressed.len());
        let mut decompressed = Vec::new();
        flate2::read::GzDecoder::new(&*compressed).read_to_end(&mut decompressed).unwrap();
        assert!(decompressed == text);
    }

    #[tokio::test]
    async fn body_that_fails_is_cut_off() {
        let frames = [Ok(Bytes::from(vec![b'x'; 5000])), Err(axum::Error::new(io::Error::other("lost")))];
        let body = GzipBody::new(Body::from_stream(futures_util::stream::iter(frames)));
        assert!(body.collect().await.is_err());
    }

    #[test]
    fn compresses_only_large_documents() {
        let respond = |content_type: &'static str, size: usize| {
            let mut response = crate::response::content(content_type, vec![b'x'; size]);
            response.extensions_mut().insert(Compressible);
            compress(true, response)
        };
        let is_gzip = |response: &Response| response.headers().contains_key(CONTENT_ENCODING);
        assert!(is_gzip(&respond("application/json", 1024)));
        assert!(is_gzip(&respond("text/html; charset=utf-8", 1024)));
        for (content_type, size) in
            [("application/json", 1023), ("application/octet-stream", 9999), ("text/event-stream", 9999)]
        {
            let response = respond(content_type, size);
            assert!(!is_gzip(&response) && !response.headers().contains_key(VARY), "{content_type} {size}");
        }
        let unmarked = compress(true, crate::response::content("application/json", vec![b'x'; 2000]));
        assert!(!is_gzip(&unmarked));
    }
}
