//! Paths and query strings of requests.

use form_urlencoded::Serializer;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use super::error::{Error, Result};

/// All characters except the unreserved ones of RFC 3986.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Joins path segments, each encoded, so that a slash in a name stays part of the name.
pub(super) fn path(segments: &[&str]) -> Result<String> {
    let mut path = String::new();
    for segment in segments {
        // URL parsers resolve dot segments, even encoded ones: `keys/..` is not a key.
        if matches!(*segment, "" | "." | "..") {
            return Err(Error::InvalidInput(format!("{segment:?} cannot be a name or key")));
        }
        path.push('/');
        path.extend(utf8_percent_encode(segment, RESERVED));
    }
    Ok(path)
}

/// Appends the query parameters that have a value.
pub(super) fn with_query(path: String, parameters: &[(&str, Option<&str>)]) -> String {
    extend_query(path, parameters.iter().filter_map(|(name, value)| Some((*name, (*value)?))))
}

/// Appends parameters to the query, which the path may already have.
pub(super) fn extend_query<'a>(
    path: String,
    parameters: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> String {
    let query = Serializer::new(String::new()).extend_pairs(parameters).finish();
    let separator = if path.contains('?') { '&' } else { '?' };
    if query.is_empty() { path } else { format!("{path}{separator}{query}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodes_every_path_segment() {
        assert_eq!(path(&["nodes", "a/b ?#%é"]).unwrap(), "/nodes/a%2Fb%20%3F%23%25%C3%A9");
        assert_eq!(path(&["nodes", "a-b.c_d~e"]).unwrap(), "/nodes/a-b.c_d~e");
    }

    #[test]
    fn rejects_names_that_would_traverse_the_path() {
        for name in ["", ".", ".."] {
            assert!(path(&["auth", "namespaces", "ci", "keys", name]).is_err(), "{name:?}");
        }
    }

    #[test]
    fn queries_contain_only_parameters_with_a_value() {
        let query = |limit, kind| with_query("/events".into(), &[("limit", limit), ("event_type", kind)]);
        assert_eq!(query(None, None), "/events");
        assert_eq!(query(None, Some("a&b")), "/events?event_type=a%26b");
        assert_eq!(query(Some("7"), Some("audit")), "/events?limit=7&event_type=audit");
        assert_eq!(extend_query("/events?limit=7".into(), [("sort", "-a")]), "/events?limit=7&sort=-a");
    }
}
