//! Maps errors to HTTP statuses and bodies.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use muster_types::Error;
use muster_types::ids::InstanceId;
use muster_types::instance::InstanceState;
use muster_types::scheduling::SchedulingStage;
use serde::Serialize;
use serde_json::json;
use utoipa::ToSchema;

use crate::response::{json_response, with_members};

/// The body of every response with an error status.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Error)]
pub(crate) struct ErrorBody {
    /// The reason.
    error: String,
    /// The HTTP status.
    status: u16,
    /// The id of the request, also in the header `x-request-id`, for the log and the events.
    // Added to all errors in one place.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, required = true)]
    request_id: Option<String>,
    /// Only with status 507 of a new instance: the first stage of scheduling that no node has passed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = SchedulingStage, required = false)]
    stage: Option<SchedulingStage>,
    /// Only with status 507 of a new instance: whether the same request may succeed later.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = bool, required = false)]
    transient: Option<bool>,
    /// The instance that could not be created and is kept in state `error`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = InstanceId, required = false)]
    instance_uuid: Option<InstanceId>,
    /// The state of that instance, which is removed after CLEANER_DELAY seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = InstanceState, required = false)]
    instance_state: Option<InstanceState>,
}

impl ErrorBody {
    fn new(status: StatusCode, error: String) -> Self {
        Self {
            error,
            status: status.as_u16(),
            request_id: None,
            stage: None,
            transient: None,
            instance_uuid: None,
            instance_state: None,
        }
    }
}

/// Returns an error response in the common shape.
pub(crate) fn error_response(status: StatusCode, error: impl Into<String>) -> Response {
    json_response(status, &ErrorBody::new(status, error.into()))
}

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

/// Seconds after which a caller should retry when a dependency, such as the database, is unavailable.
const RETRY_AFTER_OUTAGE: HeaderValue = HeaderValue::from_static("5");

/// Seconds after which a caller should retry when an object is not ready yet, or a wait has ended.
const RETRY_AFTER_NOT_READY: HeaderValue = HeaderValue::from_static("1");

/// The result of a handler.
pub(crate) type ApiResult<T> = Result<T, ApiError>;

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let (status, text) = match self.0 {
            Error::InstanceFailed { instance, error } => {
                let members =
                    [("instance_uuid", json!(instance)), ("instance_state", json!(InstanceState::Error))];
                return with_members(Self(*error).into_response(), members);
            }
            Error::Unschedulable { text, stage, transient } => {
                let status = StatusCode::INSUFFICIENT_STORAGE;
                let body = ErrorBody {
                    stage: Some(stage),
                    transient: Some(transient),
                    ..ErrorBody::new(status, text)
                };
                let mut response = json_response(status, &body);
                if transient {
                    response.headers_mut().insert(header::RETRY_AFTER, RETRY_AFTER);
                }
                return response;
            }
            Error::TooManyRequests { text, retry_after } => {
                let mut response = error_response(StatusCode::TOO_MANY_REQUESTS, text);
                response.headers_mut().insert(header::RETRY_AFTER, retry_after.into());
                return response;
            }
            Error::Busy { text, retry_after } => {
                let mut response = error_response(StatusCode::CONFLICT, text);
                response.headers_mut().insert(header::RETRY_AFTER, retry_after.into());
                return response;
            }
            Error::Invalid(text) => (StatusCode::BAD_REQUEST, text),
            Error::Unauthenticated(text) => (StatusCode::UNAUTHORIZED, text),
            Error::Forbidden(text) => (StatusCode::FORBIDDEN, text),
            Error::NotFound(text) => (StatusCode::NOT_FOUND, text),
            Error::NotReady(text) => (StatusCode::NOT_ACCEPTABLE, text),
            Error::PreconditionFailed(text) => (StatusCode::PRECONDITION_FAILED, text),
            Error::Timeout(text) => (StatusCode::REQUEST_TIMEOUT, text),
            error @ Error::AddressInUse(_) => (StatusCode::CONFLICT, error.to_string()),
            error @ Error::Contended => (StatusCode::SERVICE_UNAVAILABLE, error.to_string()),
            Error::Conflict(text) => (StatusCode::CONFLICT, text),
            Error::LengthRequired(text) => (StatusCode::LENGTH_REQUIRED, text),
            Error::TooLarge(text) => (StatusCode::PAYLOAD_TOO_LARGE, text),
            Error::TooLong(text) | Error::Mismatch(text) => (StatusCode::UNPROCESSABLE_ENTITY, text),
            Error::InsufficientCapacity(text) => (StatusCode::INSUFFICIENT_STORAGE, text),
            Error::Unavailable(text) | Error::StaleEpoch(text) | Error::PortInUse(text) => {
                (StatusCode::SERVICE_UNAVAILABLE, text)
            }
            Error::NotConfigured(text) => (StatusCode::INTERNAL_SERVER_ERROR, text),
            Error::Internal(reason) => {
                tracing::error!(%reason, "server error");
                (StatusCode::INTERNAL_SERVER_ERROR, "server error".to_owned())
            }
        };
        let mut response = error_response(status, text);
        let retry_after = match status {
            StatusCode::SERVICE_UNAVAILABLE => Some(RETRY_AFTER_OUTAGE),
            StatusCode::INSUFFICIENT_STORAGE => Some(RETRY_AFTER),
            StatusCode::NOT_ACCEPTABLE | StatusCode::REQUEST_TIMEOUT => Some(RETRY_AFTER_NOT_READY),
            _ => None,
        };
        if let Some(seconds) = retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, seconds);
        }
        response
    }
}

/// Returns the response to a request whose handler panicked.
pub(crate) fn panicked() -> Response {
    ApiError(Error::Internal("a handler panicked".into())).into_response()
}
