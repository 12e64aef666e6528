//! `/agentoperations` and `/instances/{instance_ref}/agent`: operations inside guests.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State};
use muster_types::agent_operation::{AgentOperationRecord, ChmodMode};
use muster_types::event::EventRecord;
use muster_types::ids::AgentOperationId;
use muster_types::object::ObjectRef;
use muster_types::{Error, Result};
use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::arguments::{Args, ListQuery, NoArgs, required};
use crate::error::ApiResult;
use crate::forward::{InstanceNode, MaybeForwarded, OriginalRequest, unplaced};
use crate::guard::Authenticated;
use crate::pages::{Pages, in_pages};
use crate::response::Json;
use crate::routes::events::{EventQuery, events_of};
use crate::routes::metadata::metadata_routes;
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::agent_operation::{self, AgentOperationRequest, Budgets};
use muster_control::objects::instance;

/// Parses a duration in seconds.
fn seconds(name: &str, given: Option<&Value>) -> Result<Option<f64>> {
    let invalid = |reason: &str| Err(Error::Invalid(format!("{name} must be a {reason}")));
    match given {
        None => Ok(None),
        Some(Value::Bool(_)) => invalid("number of seconds, not a boolean"),
        Some(Value::Number(number)) => match number.as_f64().filter(|number| number.is_finite()) {
            Some(number) => Ok(Some(number)),
            None => invalid("finite number of seconds"),
        },
        Some(_) => invalid("number of seconds"),
    }
}

/// Queues an operation inside an instance of the caller.
async fn queue(
    app: &App,
    caller: &Caller,
    reference: &str,
    request: AgentOperationRequest,
    deadline: Option<f64>,
    progress_timeout: Option<f64>,
) -> ApiResult<Json<AgentOperationRecord>> {
    let row = instance::find_own(app, caller, reference, None).await?;
    let budgets = Budgets { deadline_seconds: deadline, progress_timeout_seconds: progress_timeout };
    Ok(Json(agent_operation::create(app, caller, row.id, request, budgets).await?))
}

/// A command line to execute in a guest.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"command_line": "uname -a", "deadline_seconds": 60}))]
pub(crate) struct NewExecution {
    /// A command line for the shell of the guest, such as `uname -a`.
    #[schema(value_type = String)]
    command_line: Option<String>,
    /// Seconds until the operation times out; 0: never; absent: AGENT_OPERATION_DEFAULT_DEADLINE.
    #[schema(value_type = Option<f64>)]
    deadline_seconds: Option<Value>,
}

/// Executes a command line in an instance.
///
/// The operation is queued. Poll it at `/agentoperations/{agentoperation_uuid}`: exit status and output are in `results` once
/// its state is `complete`.
#[utoipa::path(post, path = "/instances/{instance_ref}/agent/execute", tag = "instances",
    params(("instance_ref" = String, Path)), request_body = NewExecution, responses((status = 400, description = "A field is missing or malformed, or the agent is not ready."),
    (status = 404, description = "No such instance."), (status = 406, description = "The instance is not ready."),
    (status = 409, description = "Too many operations are queued for the instance.")))]
pub(crate) async fn execute(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(new): Args<NewExecution>,
) -> ApiResult<Json<AgentOperationRecord>> {
    let command_line = required("command_line", new.command_line)?;
    let deadline = seconds("deadline_seconds", new.deadline_seconds.as_ref())?;
    queue(&app, &caller, &reference, AgentOperationRequest::Execute { command_line }, deadline, None).await
}

/// A file to write in a guest.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = NewFile)]
#[schema(example = json!({
    "blob_uuid": "0b4c5e9e-6f5b-4a58-9c27-6f0f5b1d8a11", "path": "/etc/motd", "mode": "ugo+r"
}))]
pub(crate) struct WriteFile {
    /// The content of the file.
    #[schema(value_type = String)]
    blob_uuid: Option<String>,
    /// The absolute path of the file in the guest.
    #[schema(value_type = String)]
    path: Option<String>,
    /// The file mode: a decimal number, or symbolic such as `ugo+r`; absent: the default of the guest's agent.
    #[schema(value_type = Option<ChmodMode>)]
    mode: Option<Value>,
    /// Seconds until the operation times out; 0: never; absent: AGENT_OPERATION_DEFAULT_DEADLINE.
    #[schema(value_type = Option<f64>)]
    deadline_seconds: Option<Value>,
    /// Seconds without progress until the operation times out; 0: never; absent:
    /// AGENT_OPERATION_DEFAULT_PROGRESS_TIMEOUT.
    #[schema(value_type = Option<f64>)]
    progress_timeout_seconds: Option<Value>,
}

/// Writes a blob to a file in an instance.
#[utoipa::path(post, path = "/instances/{instance_ref}/agent/put", tag = "instances",
    params(("instance_ref" = String, Path)), request_body = WriteFile, responses((status = 400, description = "A field is missing or malformed, or the agent is not ready."),
    (status = 404, description = "No such instance or blob."),
    (status = 406, description = "The instance is not ready, or the mode is invalid."),
    (status = 409, description = "Too many operations are queued for the instance.")))]
pub(crate) async fn put(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(file): Args<WriteFile>,
) -> ApiResult<Json<AgentOperationRecord>> {
    let (blob, path) = (required("blob_uuid", file.blob_uuid)?, required("path", file.path)?);
    let deadline = seconds("deadline_seconds", file.deadline_seconds.as_ref())?;
    let progress = seconds("progress_timeout_seconds", file.progress_timeout_seconds.as_ref())?;
    let request = AgentOperationRequest::Put { blob, path, mode: file.mode };
    queue(&app, &caller, &reference, request, deadline, progress).await
}

/// A file to read in a guest.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = WantedFile)]
#[schema(example = json!({"path": "/var/log/syslog"}))]
pub(crate) struct ReadFile {
    /// The absolute path of the file in the guest.
    #[schema(value_type = String)]
    path: Option<String>,
    /// Seconds until the operation times out; 0: never; absent: AGENT_OPERATION_DEFAULT_DEADLINE.
    #[schema(value_type = Option<f64>)]
    deadline_seconds: Option<Value>,
    /// Seconds without progress until the operation times out; 0: never; absent:
    /// AGENT_OPERATION_DEFAULT_PROGRESS_TIMEOUT.
    #[schema(value_type = Option<f64>)]
    progress_timeout_seconds: Option<Value>,
}

/// Reads a file in an instance into a blob.
///
/// The operation is queued. The UUID of the blob is in `results` once its state is `complete`.
#[utoipa::path(post, path = "/instances/{instance_ref}/agent/get", tag = "instances",
    params(("instance_ref" = String, Path)), request_body = ReadFile, responses((status = 400, description = "A field is missing or malformed, or the agent is not ready."),
    (status = 404, description = "No such instance."), (status = 406, description = "The instance is not ready."),
    (status = 409, description = "Too many operations are queued for the instance.")))]
pub(crate) async fn get_file(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(file): Args<ReadFile>,
) -> ApiResult<Json<AgentOperationRecord>> {
    let path = required("path", file.path)?;
    let deadline = seconds("deadline_seconds", file.deadline_seconds.as_ref())?;
    let progress = seconds("progress_timeout_seconds", file.progress_timeout_seconds.as_ref())?;
    queue(&app, &caller, &reference, AgentOperationRequest::Get { path }, deadline, progress).await
}

/// Lists the agent operations of an instance, in order of execution.
#[utoipa::path(get, path = "/instances/{instance_ref}/agentoperations", tag = "instances",
    params(("instance_ref" = String, Path), ListQuery), responses((status = 404, description = "No such instance.")))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(query): Args<ListQuery>,
) -> ApiResult<Pages<AgentOperationRecord>> {
    let all = query.all();
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

/// Returns what the guest of an instance reports: its distribution, mounts and SSH host keys.
#[utoipa::path(get, path = "/instances/{instance_ref}/agent/facts", tag = "instances",
    params(("instance_ref" = String, Path)), responses(
    (status = 200, description = "`distribution`, `mounts`, `ssh-host-keys`."),
    (status = 400, description = "The agent is not ready."), (status = 404, description = "No such instance."),
    (status = 406, description = "The instance is not ready."),
    (status = 503, description = "The agent does not respond.")))]
pub(crate) async fn facts(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    request: OriginalRequest,
    _: Args<NoArgs>,
) -> ApiResult<MaybeForwarded<Json<Map<String, Value>>>> {
    let row = instance::find_own(&app, &caller, &reference, None).await?;
    instance::require_created(&row)?;
    match InstanceNode::find(&app, &caller, &row, request).await? {
        InstanceNode::Local(node) => {
            // An agent may announce itself and never respond.
            let timeout = Duration::from_secs(app.settings.api_async_wait);
            let facts = tokio::time::timeout(timeout, agent_operation::facts(&app, &node, &row)).await;
            let unresponsive = |_| Error::Unavailable("the agent of the instance does not respond".into());
            Ok(MaybeForwarded::Local(Json(facts.map_err(unresponsive)??)))
        }
        InstanceNode::Forwarded(response) => Ok(MaybeForwarded::Forwarded(response)),
        InstanceNode::Unplaced => Err(unplaced().into()),
    }
}

/// Returns an agent operation.
#[utoipa::path(get, path = "/agentoperations/{agentoperation_uuid}", tag = "agentoperations",
    params(("agentoperation_uuid" = String, Path)), responses((status = 404, description = "No such agent operation.")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(operation): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Json<AgentOperationRecord>> {
    Ok(Json(agent_operation::get(&app, &caller, id(&operation)?).await?))
}

/// Deletes an agent operation. If it is running in the guest, it is aborted.
#[utoipa::path(delete, path = "/agentoperations/{agentoperation_uuid}", tag = "agentoperations",
    params(("agentoperation_uuid" = String, Path)), responses((status = 404, description = "No such agent operation.")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(operation): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Json<AgentOperationRecord>> {
    Ok(Json(agent_operation::delete(&app, &caller, id(&operation)?).await?))
}

/// Lists the events of an agent operation, newest first.
#[utoipa::path(get, path = "/agentoperations/{agentoperation_uuid}/events", tag = "agentoperations",
    params(("agentoperation_uuid" = String, Path), EventQuery), responses((status = 404, description = "No such agent operation.")))]
pub(crate) async fn list_events(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(operation): Path<String>,
    Args(query): Args<EventQuery>,
) -> ApiResult<Pages<EventRecord>> {
    events_of(&app, &object(&app, &caller, &operation).await?, &query).await
}

/// Finds an agent operation that the caller may read.
async fn object(app: &App, caller: &Caller, operation: &str) -> Result<ObjectRef, Error> {
    Ok(agent_operation::object(agent_operation::find(app, caller, id(operation)?).await?.id))
}

/// Finds an agent operation that the caller may change.
async fn own_object(app: &App, caller: &Caller, operation: &str) -> Result<ObjectRef, Error> {
    Ok(agent_operation::object(agent_operation::find_own(app, caller, id(operation)?).await?.id))
}

metadata_routes!(
    "/agentoperations/{agentoperation_uuid}/metadata",
    "/agentoperations/{agentoperation_uuid}/metadata/{key}",
    ("agentoperation_uuid" => agentoperation_uuid: String),
    "agentoperations",
    super::object,
    super::own_object
);

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn accepts_only_numbers_as_seconds() {
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
