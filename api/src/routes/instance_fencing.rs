//! `/instances`: what happens when the host of an instance is lost, or cannot reach the database.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::instance::{FencingPolicy, InstanceRecord, RestartPolicy};
use serde::Deserialize;
use utoipa::ToSchema;

use crate::arguments::Args;
use crate::error::ApiResult;
use crate::forward::{InstanceNode, MaybeForwarded, OriginalRequest, unplaced};
use crate::guard::Authenticated;
use crate::response::Json;
use muster_control::app::App;
use muster_control::objects::instance::{self, fence, find_own, require_created};

/// The policies of an instance.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"fencing": "self", "restart": "elsewhere"}))]
pub(crate) struct InstanceFencing {
    /// What happens when its node cannot reach the database; the policy of the cluster (`FENCING`) by default.
    #[schema(value_type = Option<FencingPolicy>)]
    fencing: Option<String>,
    /// What happens when its host is lost; `manual` by default. `elsewhere` requires self-fencing.
    #[schema(value_type = Option<RestartPolicy>)]
    restart: Option<String>,
}

/// Replaces the policies of an instance: `fencing` and `restart`. The node of the instance must be up.
#[utoipa::path(put, path = "/instances/{instance_ref}/fencing", tag = "instances",
    params(("instance_ref" = String, Path)), request_body = InstanceFencing, responses(
    (status = 404, description = "No such instance."),
    (status = 406, description = "The instance is not ready."),
    (status = 409, description = "The instance changed concurrently.")))]
pub(crate) async fn update(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    request: OriginalRequest,
    Args(new): Args<InstanceFencing>,
) -> ApiResult<MaybeForwarded<Json<InstanceRecord>>> {
    let row = find_own(&app, &caller, &reference, None).await?;
    require_created(&row)?;
    match InstanceNode::find(&app, &caller, &row, request).await? {
        InstanceNode::Local(node) => {
            let (restart, fencing) = (new.restart.as_deref(), new.fencing.as_deref());
            fence::set_policies(&app, &caller, &node, row.id, restart, fencing).await?;
            let record = instance::get(&app, &caller, &row.id.to_string(), None).await?;
            Ok(MaybeForwarded::Local(Json(record)))
        }
        InstanceNode::Forwarded(response) => Ok(MaybeForwarded::Forwarded(response)),
        InstanceNode::Unplaced => Err(unplaced().into()),
    }
}
