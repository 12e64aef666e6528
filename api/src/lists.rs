//! `limit`, `cursor`, `sort` and `filter`, which every list accepts. See docs/decisions/0087.
//!
//! A layer around the handlers of lists ([`select`]) reads the parameters and removes them from the request, so that handlers
//! need not know them. [`Pages`](crate::pages::Pages) then returns the requested part of the list.

mod fields;
mod request;
mod sorting;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::Uri;
use axum::http::uri::PathAndQuery;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use muster_types::Error;

pub(crate) use fields::ListFields;
pub(crate) use request::{ListRequest, PageKey};

use crate::error::ApiError;

tokio::task_local! {
    static REQUEST: Arc<ListRequest>;
}

/// Returns which part of a list the current request asks for; `None` for the whole list.
pub(crate) fn requested() -> Option<Arc<ListRequest>> {
    REQUEST.try_with(Arc::clone).ok()
}

/// Passes a request for a part of a list on without the parameters that select it.
pub(crate) async fn select(
    State(fields): State<Arc<ListFields>>,
    mut request: Request,
    next: Next,
) -> Response {
    let query = request.uri().query().unwrap_or_default();
    let (list, rest) = match ListRequest::parse(&fields, query) {
        Ok(Some(parsed)) => parsed,
        Ok(None) => return next.run(request).await,
        Err(error) => return ApiError(error).into_response(),
    };
    match with_query(request.uri(), &rest) {
        Ok(uri) => *request.uri_mut() = uri,
        Err(error) => return ApiError(error).into_response(),
    }
    REQUEST.scope(Arc::new(list), next.run(request)).await
}

/// Replaces the query of a URI.
pub(crate) fn with_query(uri: &Uri, query: &str) -> Result<Uri, Error> {
    let path = uri.path();
    let text = if query.is_empty() { path.to_owned() } else { format!("{path}?{query}") };
    let mut parts = uri.clone().into_parts();
    let failed = |error: &dyn std::fmt::Display| Error::Internal(format!("failed to build a URI: {error}"));
    parts.path_and_query = Some(PathAndQuery::try_from(text).map_err(|error| failed(&error))?);
    Uri::from_parts(parts).map_err(|error| failed(&error))
}
