//! Maps errors to HTTP statuses and bodies.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use muster_types::Error;
use serde_json::json;

use crate::response::json_response;

/// An error that is sent as a response.
#[derive(Debug)]
pub(crate) struct ApiError(pub(crate) Error);

impl<E: Into<Error>> From<E> for ApiError {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

/// Seconds after which a caller should retry when the cluster lacks capacity.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("15");

/// The result of a handler.
pub(crate) type ApiResult<T> = Result<T, ApiError>;

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let (status, text) = match self.0 {
            Error::Unschedulable { text, stage, transient } => {
                let status = StatusCode::INSUFFICIENT_STORAGE;
                let mut response = json_response(
                    status,
                    &json!({ "error": text, "status": status.as_u16(), "stage": stage, "transient": transient }),
                );
                if transient {
                    response.headers_mut().insert(header::RETRY_AFTER, RETRY_AFTER);
                }
                return response;
            }
            Error::TooManyRequests { text, retry_after } => {
                let status = StatusCode::TOO_MANY_REQUESTS;
                let mut response =
                    json_response(status, &json!({ "error": text, "status": status.as_u16() }));
                response.headers_mut().insert(header::RETRY_AFTER, retry_after.into());
                return response;
            }
            Error::Invalid(text) => (StatusCode::BAD_REQUEST, text),
            Error::Unauthenticated(text) => (StatusCode::UNAUTHORIZED, text),
            Error::Forbidden(text) => (StatusCode::FORBIDDEN, text),
            Error::NotFound(text) => (StatusCode::NOT_FOUND, text),
            Error::NotReady(text) => (StatusCode::NOT_ACCEPTABLE, text),
            Error::Timeout(text) => (StatusCode::REQUEST_TIMEOUT, text),
            error @ Error::AddressInUse(_) => (StatusCode::CONFLICT, error.to_string()),
            error @ Error::Contended => (StatusCode::SERVICE_UNAVAILABLE, error.to_string()),
            Error::Conflict(text) => (StatusCode::CONFLICT, text),
            Error::LengthRequired(text) => (StatusCode::LENGTH_REQUIRED, text),
            Error::TooLarge(text) => (StatusCode::PAYLOAD_TOO_LARGE, text),
            Error::TooLong(text) => (StatusCode::UNPROCESSABLE_ENTITY, text),
            Error::InsufficientCapacity(text) => (StatusCode::INSUFFICIENT_STORAGE, text),
            Error::Unavailable(text) | Error::PortInUse(text) => (StatusCode::SERVICE_UNAVAILABLE, text),
            Error::NotConfigured(text) => (StatusCode::INTERNAL_SERVER_ERROR, text),
            Error::Internal(reason) => {
                tracing::error!(%reason, "server error");
                (StatusCode::INTERNAL_SERVER_ERROR, "server error".to_owned())
            }
        };
        json_response(status, &json!({ "error": text, "status": status.as_u16() }))
    }
}
