//! Entity tags, which identify a version of what a request returns.

use aws_lc_rs::digest::Digest;
use axum::http::HeaderValue;

/// Returns the tag of a checksum.
pub(crate) fn of(checksum: &Digest) -> HeaderValue {
    let tag = format!("\"{}\"", hex::encode(&checksum.as_ref()[..16]));
    HeaderValue::from_str(&tag).expect("hexadecimal digits are valid in a header")
}

/// Returns whether the tags of a header such as `If-None-Match` include a tag. Weak tags are equal to strong ones: a proxy,
/// or the compression of a response, makes them weak.
pub(crate) fn matches(tags: &HeaderValue, etag: &HeaderValue) -> bool {
    let (Ok(tags), Ok(etag)) = (tags.to_str(), etag.to_str()) else { return false };
    let strong = |tag: &str| tag.trim().trim_start_matches("W/").to_owned();
    tags.split(',').any(|tag| tag.trim() == "*" || strong(tag) == strong(etag))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compares_each_tag_of_a_list() {
        let etag = HeaderValue::from_static("\"b\"");
        for tags in ["\"b\"", "W/\"b\"", "\"a\", \"b\"", "*", " \"a\",W/\"b\" "] {
            assert!(matches(&HeaderValue::from_static(tags), &etag), "{tags}");
        }
        for tags in ["", "b", "\"a\"", "\"bb\"", "\"a\", \"c\""] {
            assert!(!matches(&HeaderValue::from_static(tags), &etag), "{tags}");
        }
    }
}
