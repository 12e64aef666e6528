//! `/agentoperations`, and `/instances`: what is to be done inside guests.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::agent_operation::AgentOperationRecord;
use muster_types::event::EventRecord;
use muster_types::ids::AgentOperationId;
use muster_types::{Error, Result};
use serde::Deserialize;
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use crate::arguments::{Args, Nothing};
use crate::error::ApiResult;
use crate::events::{EventQuery, answer};
use crate::fields::{Boolean, Text};
use crate::guard::Authenticated;
use crate::pages::in_pages;
use crate::response::ok;
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::agent_operation::{self, AgentOperationRequest, Budgets};
use muster_control::objects::instance;

/// Seconds that a caller allows; nothing if it does not say.
fn seconds(name: &str, given: Option<&Value>) -> Result<Option<f64>> {
    let bad = |why: &str| Err(Error::Invalid(format!("{name} must be a {why}")));
    match given {
        None => Ok(None),
        Some(Value::Bool(_)) => bad("number of seconds, not a boolean"),
        Some(Value::Number(number)) => match number.as_f64().filter(|number| number.is_finite()) {
            Some(number) => Ok(Some(number)),
            None => bad("finite number of seconds"),
        },
        Some(_) => bad("number of seconds"),
    }
}

fn required(name: &str, text: Option<Text>) -> Result<String> {
    let missing = || Error::Invalid(format!("{name}: Missing data for required field."));
    text.map(|text| text.0).ok_or_else(missing)
}

/// Queues what a caller wants done in an instance of its own.
async fn queue(
    app: &App,
    caller: &Caller,
    reference: &str,
    wanted: AgentOperationRequest,
    deadline: Option<f64>,
    progress_timeout: Option<f64>,
) -> ApiResult {
    let row = instance::find_own(app, caller, reference, None).await?;
    let budgets = Budgets { deadline_seconds: deadline, progress_timeout_seconds: progress_timeout };
    Ok(ok(&agent_operation::create(app, caller, row.id, wanted, budgets).await?))
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct NewExecution {
    /// For the guest's shell.
    #[schema(value_type = String)]
    command_line: Option<Text>,
    /// Seconds until it is given up; 0: never; absent: AGENT_OPERATION_DEFAULT_DEADLINE.
    #[schema(value_type = Option<f64>)]
    deadline_seconds: Option<Value>,
}

/// Run a command line in an instance.
#[utoipa::path(post, path = "/instances/{instance_ref}/agent/execute", tag = "instances",
    params(("instance_ref" = String, Path)), request_body = NewExecution, responses(
    (status = 200, body = AgentOperationRecord),
    (status = 400, description = "a field is missing or malformed, or the agent is not ready"),
    (status = 404, description = "no such instance"), (status = 406, description = "the instance is not ready"),
    (status = 409, description = "too much is waiting to be done in it")))]
pub(crate) async fn execute(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(new): Args<NewExecution>,
) -> ApiResult {
    let command_line = required("command_line", new.command_line)?;
    let deadline = seconds("deadline_seconds", new.deadline_seconds.as_ref())?;
    queue(&app, &caller, &reference, AgentOperationRequest::Execute { command_line }, deadline, None).await
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct NewFile {
    /// What it holds.
    #[schema(value_type = String)]
    blob_uuid: Option<Text>,
    /// Where it goes in the guest, an absolute path.
    #[schema(value_type = String)]
    path: Option<Text>,
    /// Its permissions: a decimal number, or words such as `ugo+r`; absent: whatever the guest's agent gives it.
    #[schema(value_type = Option<Object>)]
    mode: Option<Value>,
    /// Seconds until it is given up; 0: never; absent: AGENT_OPERATION_DEFAULT_DEADLINE.
    #[schema(value_type = Option<f64>)]
    deadline_seconds: Option<Value>,
    /// Seconds that it may stand still; 0: for ever; absent: AGENT_OPERATION_DEFAULT_PROGRESS_TIMEOUT.
    #[schema(value_type = Option<f64>)]
    progress_timeout_seconds: Option<Value>,
}

/// Put a blob into an instance, as a file.
#[utoipa::path(post, path = "/instances/{instance_ref}/agent/put", tag = "instances",
    params(("instance_ref" = String, Path)), request_body = NewFile, responses(
    (status = 200, body = AgentOperationRecord),
    (status = 400, description = "a field is missing or malformed, or the agent is not ready"),
    (status = 404, description = "no such instance or blob"),
    (status = 406, description = "the instance is not ready, or the mode is none"),
    (status = 409, description = "too much is waiting to be done in it")))]
pub(crate) async fn put(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(new): Args<NewFile>,
) -> ApiResult {
    let (blob, path) = (required("blob_uuid", new.blob_uuid)?, required("path", new.path)?);
    let deadline = seconds("deadline_seconds", new.deadline_seconds.as_ref())?;
    let progress = seconds("progress_timeout_seconds", new.progress_timeout_seconds.as_ref())?;
    let wanted = AgentOperationRequest::Put { blob, path, mode: new.mode };
    queue(&app, &caller, &reference, wanted, deadline, progress).await
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct WantedFile {
    /// Where it is in the guest, an absolute path.
    #[schema(value_type = String)]
    path: Option<Text>,
    /// Seconds until it is given up; 0: never; absent: AGENT_OPERATION_DEFAULT_DEADLINE.
    #[schema(value_type = Option<f64>)]
    deadline_seconds: Option<Value>,
    /// Seconds that it may stand still; 0: for ever; absent: AGENT_OPERATION_DEFAULT_PROGRESS_TIMEOUT.
    #[schema(value_type = Option<f64>)]
    progress_timeout_seconds: Option<Value>,
}

/// Get a file out of an instance, as a blob.
#[utoipa::path(post, path = "/instances/{instance_ref}/agent/get", tag = "instances",
    params(("instance_ref" = String, Path)), request_body = WantedFile, responses(
    (status = 200, body = AgentOperationRecord),
    (status = 400, description = "a field is missing or malformed, or the agent is not ready"),
    (status = 404, description = "no such instance"), (status = 406, description = "the instance is not ready"),
    (status = 409, description = "too much is waiting to be done in it")))]
pub(crate) async fn get_file(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(wanted): Args<WantedFile>,
) -> ApiResult {
    let path = required("path", wanted.path)?;
    let deadline = seconds("deadline_seconds", wanted.deadline_seconds.as_ref())?;
    let progress = seconds("progress_timeout_seconds", wanted.progress_timeout_seconds.as_ref())?;
    queue(&app, &caller, &reference, AgentOperationRequest::Get { path }, deadline, progress).await
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// Whether those that ended are listed, too. Also taken from the body.
    #[param(value_type = Option<bool>)]
    all: Option<Boolean>,
}

/// What is to be done inside an instance, in order.
#[utoipa::path(get, path = "/instances/{instance_ref}/agentoperations", tag = "instances",
    params(("instance_ref" = String, Path), ListQuery), responses(
    (status = 200, body = Vec<AgentOperationRecord>), (status = 404, description = "no such instance")))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(query): Args<ListQuery>,
) -> ApiResult {
    let all = query.all.is_some_and(|all| all.0);
    let instance = instance::find(&*app.store, &caller, &reference, None).await?.id;
    in_pages(move |after: Option<i64>| {
        let app = Arc::clone(&app);
        async move { agent_operation::list_page(&app, instance, all, after).await }
    })
    .await
}

fn id(text: &str) -> Result<AgentOperationId> {
    text.parse().map_err(|_| Error::not_found("agent operation"))
}

/// One agent operation.
#[utoipa::path(get, path = "/agentoperations/{agentoperation_uuid}", tag = "agentoperations",
    params(("agentoperation_uuid" = String, Path)), responses((status = 200, body = AgentOperationRecord),
    (status = 404, description = "no such agent operation")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(operation): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&agent_operation::get(&app, &caller, id(&operation)?).await?))
}

/// Delete an agent operation. What it does in the guest is ended.
#[utoipa::path(delete, path = "/agentoperations/{agentoperation_uuid}", tag = "agentoperations",
    params(("agentoperation_uuid" = String, Path)), responses((status = 200, body = AgentOperationRecord),
    (status = 404, description = "no such agent operation")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(operation): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&agent_operation::delete(&app, &caller, id(&operation)?).await?))
}

/// Events of an agent operation, newest first.
#[utoipa::path(get, path = "/agentoperations/{agentoperation_uuid}/events", tag = "agentoperations",
    params(("agentoperation_uuid" = String, Path), EventQuery), responses(
    (status = 200, body = Vec<EventRecord>), (status = 404, description = "no such agent operation")))]
pub(crate) async fn list_events(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(operation): Path<String>,
    Args(query): Args<EventQuery>,
) -> ApiResult {
    let row = agent_operation::find(&app, &caller, id(&operation)?).await?;
    answer(&app, &agent_operation::object(row.id), &query).await
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_numbers_are_seconds() {
        let read = |value: Value| seconds("x", Some(&value)).map_err(|error| error.to_string());
        assert_eq!(seconds("x", None).unwrap(), None);
        assert_eq!(read(json!(0)), Ok(Some(0.0)));
        assert_eq!(read(json!(1.5)), Ok(Some(1.5)));
        assert_eq!(read(json!(true)), Err("x must be a number of seconds, not a boolean".into()));
        for other in [json!("5"), json!([5]), json!({}), json!("NaN")] {
            assert_eq!(read(other), Err("x must be a number of seconds".into()));
        }
    }
}
