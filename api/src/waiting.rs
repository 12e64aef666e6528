//! `wait`: a request for an object that is answered once the object has reached a state.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use muster_types::time::now;
use muster_types::{Error, Result};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::time::Instant;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::Schema;

use crate::arguments::form_pairs;
use crate::error::ApiError;
use crate::lists::with_query;
use crate::request_events::shortened;
use crate::response::RecordedBody;
use crate::schemas::{property, resolve};
use muster_control::auth::{Caller, RequestDeadline};

pub(crate) const PARAMETER: &str = "wait";
/// The maximum time that a request waits.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// How often the object is read, at first and later.
const MIN_INTERVAL: Duration = Duration::from_millis(50);
const MAX_INTERVAL: Duration = Duration::from_secs(1);
/// The maximum number of requests of a namespace that wait at a time.
const MAX_WAITING: usize = 64;
/// States that an object does not leave. An object in state `error` can still be deleted.
const FINAL_STATES: &[&str] = &["deleted", "complete", "abort", "expired", "error"];

/// The number of waiting requests by namespace.
type WaitingRequests = Arc<Mutex<HashMap<String, usize>>>;

/// The states of an object that a request can wait for.
#[derive(Debug, Clone)]
pub(crate) struct WaitableStates {
    names: Vec<String>,
    waiting: WaitingRequests,
}

impl WaitableStates {
    /// Returns the states of the records that a schema describes; `None` if they have none.
    pub(crate) fn of(record: &RefOr<Schema>, schemas: &[(String, RefOr<Schema>)]) -> Option<Self> {
        let Schema::Object(state) = resolve(property(record, "state", schemas)?, schemas)? else {
            return None;
        };
        let names = state.enum_values.as_ref()?.iter().filter_map(Value::as_str).map(str::to_owned);
        Some(Self { names: names.collect(), waiting: WaitingRequests::default() })
    }

    pub(crate) fn description(&self) -> String {
        format!(
            "Respond only when the object has reached this state, or one of several, separated by commas: `{}`. The request \
             fails with 409 if the object has reached another final state, and with 408 after 60 seconds.",
            self.names.join("`, `")
        )
    }

    fn parse(&self, text: &str) -> Result<Vec<String>> {
        let wanted: Vec<String> = text.split(',').map(|name| name.trim().to_owned()).collect();
        match wanted.iter().find(|name| !self.names.contains(name)) {
            None => Ok(wanted),
            Some(unknown) => {
                let unknown = shortened(unknown.replace(char::is_control, ""), 64);
                let names = self.names.join(", ");
                Err(Error::Invalid(format!("{PARAMETER}: unknown state {unknown:?}, use one of: {names}")))
            }
        }
    }

    /// Counts a request of a namespace until the result is dropped.
    fn begin(&self, namespace: &str) -> Result<WaitingRequest> {
        let mut waiting = self.waiting.lock();
        let count = waiting.entry(namespace.to_owned()).or_default();
        if *count >= MAX_WAITING {
            let text = format!("{PARAMETER}: {MAX_WAITING} requests of the namespace are waiting already");
            return Err(Error::TooManyRequests { text, retry_after: 5 });
        }
        *count += 1;
        Ok(WaitingRequest { namespace: namespace.to_owned(), waiting: Arc::clone(&self.waiting) })
    }
}

struct WaitingRequest {
    namespace: String,
    waiting: WaitingRequests,
}

impl Drop for WaitingRequest {
    fn drop(&mut self) {
        let mut waiting = self.waiting.lock();
        if let Some(count) = waiting.get_mut(&self.namespace) {
            *count -= 1;
            if *count == 0 {
                waiting.remove(&self.namespace);
            }
        }
    }
}

/// Repeats a request for an object until the object has a requested state.
pub(crate) async fn wait(
    State(states): State<Arc<WaitableStates>>,
    mut request: Request,
    next: Next,
) -> Response {
    let query = request.uri().query().unwrap_or_default();
    let Some((_, text)) = form_pairs(query).find(|(name, _)| name == PARAMETER) else {
        return next.run(request).await;
    };
    let rest = form_pairs(query).filter(|(name, _)| name != PARAMETER);
    let rest = form_urlencoded::Serializer::new(String::new()).extend_pairs(rest).finish();
    match with_query(request.uri(), &rest) {
        Ok(uri) => *request.uri_mut() = uri,
        Err(error) => return ApiError(error).into_response(),
    }
    match repeat(&states, &text, request, next).await {
        Ok(response) => response,
        Err(error) => ApiError(error).into_response(),
    }
}

async fn repeat(states: &WaitableStates, text: &str, request: Request, next: Next) -> Result<Response> {
    let wanted = states.parse(text)?;
    let (parts, _) = request.into_parts();
    let deadline = parts.extensions.get::<RequestDeadline>().cloned().unwrap_or_default();
    let namespace = parts.extensions.get::<Caller>().map(|caller| caller.namespace.as_str());
    let _waiting = states.begin(namespace.unwrap_or_default())?;
    // Some time is left to send the response before the caller gives up.
    let left = deadline.expires().map_or(MAX_WAIT.as_secs_f64(), |expires| expires - now() - 1.0);
    let max_wait = Duration::from_secs_f64(left.clamp(0.0, MAX_WAIT.as_secs_f64()));
    let ends = Instant::now() + max_wait;
    let mut interval = MIN_INTERVAL;
    loop {
        let response = next.clone().run(Request::from_parts(parts.clone(), Body::empty())).await;
        let Some(state) = state_of(&response) else { return Ok(response) };
        if wanted.contains(&state) {
            return Ok(response);
        }
        let can_be_deleted = state == "error" && wanted.iter().any(|name| name == "deleted");
        if FINAL_STATES.contains(&state.as_str()) && !can_be_deleted {
            return Err(Error::Conflict(format!("the state is {state} and will not become {text}")));
        }
        let now = Instant::now();
        if now >= ends {
            let seconds = max_wait.as_secs();
            return Err(Error::Timeout(format!(
                "the state is {state}, not {text}, after {seconds} seconds; repeat the request to wait longer"
            )));
        }
        tokio::time::sleep_until((now + interval).min(ends)).await;
        interval = (interval * 3 / 2).min(MAX_INTERVAL);
        deadline.require_waiting()?;
    }
}

/// Returns the state of the object in a successful response.
fn state_of(response: &Response) -> Option<String> {
    let body = response.extensions().get::<RecordedBody>().filter(|_| response.status().is_success())?;
    let record: Value = serde_json::from_slice(&body.0).ok()?;
    record.get("state")?.as_str().map(str::to_owned)
}
