//! Request arguments: the members of a JSON body, on any method and with any content type, and the query string.

use std::sync::Arc;

use axum::extract::{FromRequest, FromRequestParts, RawPathParams, Request};
use axum::http::Method;
use futures_util::future::BoxFuture;
use muster_types::Error;
use muster_types::spec::ValidationMode;
use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, Visitor};
use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::incoming::Incoming;
use crate::lenient::Lenient;
use crate::request_events::shortened;
use muster_control::app::App;

/// The maximum length of an unknown name in an error, in bytes.
const MAX_SHOWN_NAME: usize = 64;

/// The arguments of a request as `T`, whose fields are the ones that the endpoint declares.
#[derive(Debug)]
pub(crate) struct Args<T>(pub(crate) T);

/// The arguments of an endpoint that takes none.
#[derive(Debug, serde::Deserialize)]
pub(crate) struct NoArgs {}

/// Selects the namespace of a named object.
#[derive(Debug, serde::Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct NamespaceQuery {
    /// The namespace that the name is looked up in. Also accepted in the body.
    pub(crate) namespace: Option<String>,
}

/// Selects which objects are listed.
#[derive(Debug, serde::Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// Whether to include deleted objects and finished agent operations; false by default. Also accepted in the body.
    pub(crate) all: Option<bool>,
}

impl ListQuery {
    pub(crate) fn all(&self) -> bool {
        self.all.unwrap_or(false)
    }
}

/// Selects which operations on an object are listed.
#[derive(Debug, serde::Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct OperationsQuery {
    /// Whether to include finished operations, which exist until the cleaner removes them; true by default. Also
    /// accepted in the body.
    pub(crate) all: Option<bool>,
}

impl OperationsQuery {
    pub(crate) fn all(&self) -> bool {
        self.all.unwrap_or(true)
    }
}

/// Returns the value of a required argument, or the error that names it.
pub(crate) fn required<T>(name: &str, value: Option<T>) -> Result<T, Error> {
    value.ok_or_else(|| Error::Invalid(format!("{name}: Missing data for required field.")))
}

/// Deserializes a field for which null is a value, so that only an absent field is `None`.
pub(crate) fn nullable<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

impl<T: DeserializeOwned> FromRequest<Arc<App>> for Args<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let arguments = collect_arguments(request, app, field_names::<T>()).await?;
        serde_path_to_error::deserialize(Lenient(Value::Object(arguments)))
            .map(Self)
            .map_err(|error| Error::Invalid(format!("{}: {}", error.path(), error.inner())).into())
    }
}

/// Collects the arguments of a request to an endpoint that declares `fields`. Boxed, so that it is compiled once and not
/// for each type of arguments.
fn collect_arguments<'a>(
    request: Request,
    app: &'a Arc<App>,
    fields: &'static [&'static str],
) -> BoxFuture<'a, Result<Map<String, Value>, Error>> {
    Box::pin(async move {
        let (mut parts, _) = request.into_parts();
        let path = RawPathParams::from_request_parts(&mut parts, app).await.ok();
        let body =
            parts.extensions.get::<Incoming>().map(|incoming| incoming.body.clone()).unwrap_or_default();
        let mut given = parse_body(&body, BodyRule::of(&parts.method, fields))?;
        for (name, value) in form_pairs(parts.uri.query().unwrap_or_default()) {
            given.entry(name).or_insert(Value::String(value));
        }
        // Fields are optional, so null is the same as no value unless a field says otherwise. See [`nullable`].
        given.retain(|name, value| !value.is_null() || fields.contains(&name.as_str()));
        if let Some(path) = &path {
            drop_path_parameters(&mut given, path)?;
        }
        if let Some(unknown) = given.keys().find(|name| !fields.contains(&name.as_str())) {
            let name = unknown.replace(char::is_control, "");
            let finding = format!("{}: not declared by this endpoint", shortened(name, MAX_SHOWN_NAME));
            match app.settings.api_validation_mode {
                ValidationMode::Enforce => return Err(Error::Invalid(finding)),
                ValidationMode::Warn => {
                    tracing::warn!(finding, path = parts.uri.path(), "invalid request parameter");
                }
                ValidationMode::Off => {}
            }
            given.retain(|name, _| fields.contains(&name.as_str()));
        }
        Ok(given)
    })
}

/// Which bodies a request may have besides JSON objects and none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BodyRule {
    /// Unreadable and falsy documents count as none, as released servers do.
    Lenient,
    /// Falsy documents count as none; unreadable ones are rejected.
    Readable,
    /// None: without its arguments, a call that deletes would delete other objects than the caller means.
    Strict,
}

impl BodyRule {
    fn of(method: &Method, fields: &[&str]) -> Self {
        match *method {
            Method::DELETE => Self::Strict,
            Method::POST | Method::PUT if !fields.is_empty() => Self::Readable,
            _ => Self::Lenient,
        }
    }
}

/// Parses the members of a body.
fn parse_body(body: &[u8], rule: BodyRule) -> Result<Map<String, Value>, Error> {
    if body.is_empty() {
        return Ok(Map::new());
    }
    match serde_json::from_slice(body) {
        Ok(Value::Object(members)) => Ok(members),
        Ok(Value::Null) => Ok(Map::new()),
        Ok(document) if rule != BodyRule::Strict && is_falsy(&document) => Ok(Map::new()),
        Ok(_) => Err(Error::Invalid("the request body must be a JSON object".into())),
        Err(_) if rule == BodyRule::Lenient => Ok(Map::new()),
        Err(error) => Err(Error::Invalid(format!("the request body is not valid JSON: {error}"))),
    }
}

/// Returns whether a document that is not an object counts as none in released servers.
fn is_falsy(document: &Value) -> bool {
    match document {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(_) => false,
    }
}

/// Removes body keys that repeat a path parameter, and rejects those that contradict it.
fn drop_path_parameters(given: &mut Map<String, Value>, path: &RawPathParams) -> Result<(), Error> {
    for (name, value) in path {
        match given.get(name) {
            None | Some(Value::Null) => {
                given.remove(name);
            }
            Some(Value::String(text)) if text == value => {
                given.remove(name);
            }
            Some(_) => {
                return Err(Error::Invalid(format!(
                    "{name}: a body key of this name overwrote the URL path parameter"
                )));
            }
        }
    }
    Ok(())
}

/// Decodes the pairs of a query string.
pub(crate) fn form_pairs(query: &str) -> impl Iterator<Item = (String, String)> {
    form_urlencoded::parse(query.as_bytes()).into_owned()
}

/// Returns the serialized names of a struct's fields.
fn field_names<T: DeserializeOwned>() -> &'static [&'static str] {
    struct Names(&'static [&'static str]);
    #[derive(Debug)]
    struct Done;
    impl std::fmt::Display for Done {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("done")
        }
    }
    impl std::error::Error for Done {}
    impl serde::de::Error for Done {
        fn custom<M: std::fmt::Display>(_: M) -> Self {
            Self
        }
    }
    impl<'de> Deserializer<'de> for &mut Names {
        type Error = Done;
        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Done> {
            Err(Done)
        }
        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            _: V,
        ) -> Result<V::Value, Done> {
            self.0 = fields;
            Err(Done)
        }
        serde::forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
            unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }
    let mut names = Names(&[]);
    // Always fails: the deserializer only records the names.
    let _ = T::deserialize(&mut names);
    names.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    struct Example {
        #[serde(rename = "limit")]
        _limit: Option<i64>,
        #[serde(rename = "name")]
        _name: Option<String>,
    }

    #[test]
    fn returns_serialized_field_names() {
        assert_eq!(field_names::<Example>(), ["limit", "name"]);
        assert!(field_names::<NoArgs>().is_empty());
    }

    #[test]
    fn treats_falsy_documents_as_empty_and_rejects_other_non_objects() {
        for body in ["", "null", "[]", "\"\"", "0", "false", "{}"] {
            assert!(parse_body(body.as_bytes(), BodyRule::Readable).unwrap().is_empty(), "{body}");
        }
        for body in ["[1]", "\"x\"", "7", "true"] {
            assert!(parse_body(body.as_bytes(), BodyRule::Lenient).is_err(), "{body}");
        }
        assert!(parse_body(b"{", BodyRule::Lenient).unwrap().is_empty());
        assert!(parse_body(b"{", BodyRule::Readable).is_err());
    }

    #[test]
    fn deletion_accepts_only_an_object_or_nothing() {
        let rule = BodyRule::of(&Method::DELETE, &[]);
        for body in ["", "null", "{}"] {
            assert!(parse_body(body.as_bytes(), rule).unwrap().is_empty(), "{body}");
        }
        for body in ["{", "[]", "\"\"", "0", "false", "namespace=ci", " "] {
            assert!(parse_body(body.as_bytes(), rule).is_err(), "{body}");
        }
    }

    #[test]
    fn rejects_deeply_nested_body_without_exhausting_the_stack() {
        let body = "[".repeat(100_000);
        assert!(parse_body(body.as_bytes(), BodyRule::Readable).is_err());
    }

    #[test]
    fn decodes_query_strings() {
        let pairs: Vec<_> = form_pairs("limit=10&name=a%20b+c&&flag").collect();
        let expected = [("limit", "10"), ("name", "a b c"), ("flag", "")].map(|(a, b)| (a.into(), b.into()));
        assert_eq!(pairs, expected);
    }
}
