//! `/admin/rebalance`: moves instances from full nodes to empty ones. See docs/decisions/0075.

use std::sync::Arc;

use axum::extract::State;
use muster_types::rebalance::RebalanceRecord;
use serde::Deserialize;
use utoipa::ToSchema;

use crate::arguments::Args;
use crate::error::ApiResult;
use crate::guard::Authenticated;
use crate::response::Json;
use muster_control::app::App;
use muster_control::objects::rebalance;

/// How the cluster is rebalanced.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"dry_run": true}))]
pub(crate) struct Rebalance {
    /// Only return the plan; absent: false.
    dry_run: Option<bool>,
    /// The maximum number of instances that move, up to 100; absent: 10.
    #[schema(minimum = 1)]
    max_moves: Option<u64>,
}

/// Migrates instances from full nodes to empty ones, two at a time, until the shares of the nodes differ by at most 0.2.
///
/// Only instances move that can be migrated while they run, if that improves the balance, keeps the affinity of all instances and
/// leaves the claims of namespaces free. The operation checks each move again before it starts, and omits those that
/// do not improve the balance any longer. It ends in `error` with the reasons if instances could not be migrated.
#[utoipa::path(post, path = "/admin/rebalance", tag = "admin", request_body = Rebalance,
    responses((status = 200, description = "The plan, and the operation that executes it."),
    (status = 409, description = "The cluster is being rebalanced.")))]
pub(crate) async fn start(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Args(request): Args<Rebalance>,
) -> ApiResult<Json<RebalanceRecord>> {
    let dry_run = request.dry_run.unwrap_or(false);
    let max_moves = request.max_moves.unwrap_or(rebalance::DEFAULT_MAX_MOVES);
    Ok(Json(rebalance::start(&app, &caller, dry_run, max_moves).await?))
}
