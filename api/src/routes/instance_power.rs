//! `/instances`: power actions, which the daemon of the instance's node executes.

use std::sync::Arc;

use axum::extract::{Path, State};

use crate::arguments::{Args, NoArgs};
use crate::error::ApiResult;
use crate::forward::{InstanceNode, MaybeForwarded, OriginalRequest, unplaced};
use crate::guard::Authenticated;
use crate::response::Null;
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::instance::power::{self, PowerAction};
use muster_control::objects::instance::{find_own, require_created};

async fn act(
    app: &App,
    caller: &Caller,
    reference: &str,
    request: OriginalRequest,
    action: PowerAction,
) -> ApiResult<MaybeForwarded<Null>> {
    let row = find_own(app, caller, reference, None).await?;
    require_created(&row)?;
    match InstanceNode::find(app, caller, &row, request).await? {
        InstanceNode::Local(node) => {
            power::apply(app, caller, &node, row.id, action).await?;
            Ok(MaybeForwarded::Local(Null))
        }
        InstanceNode::Forwarded(response) => Ok(MaybeForwarded::Forwarded(response)),
        InstanceNode::Unplaced => Err(unplaced().into()),
    }
}

macro_rules! power_route {
    ($name:ident, $path:literal, $action:expr, $summary:literal) => {
        #[doc = $summary]
        #[utoipa::path(post, path = $path, tag = "instances", params(("instance_ref" = String, Path)), responses(
            (status = 404, description = "No such instance."),
            (status = 406, description = "The instance is not ready."),
            (status = 409, description = "The power state of the instance does not allow the action.")))]
        pub(crate) async fn $name(
            State(app): State<Arc<App>>,
            Authenticated(caller): Authenticated,
            Path(reference): Path<String>,
            request: OriginalRequest,
            _: Args<NoArgs>,
        ) -> ApiResult<MaybeForwarded<Null>> {
            act(&app, &caller, &reference, request, $action).await
        }
    };
}

power_route!(
    reboot_soft,
    "/instances/{instance_ref}/rebootsoft",
    PowerAction::RebootSoft,
    "Requests a reboot from the guest, which may ignore it."
);
power_route!(
    reboot_hard,
    "/instances/{instance_ref}/reboothard",
    PowerAction::RebootHard,
    "Resets an instance without involving the guest."
);
power_route!(power_on, "/instances/{instance_ref}/poweron", PowerAction::On, "Powers an instance on.");
power_route!(
    power_off,
    "/instances/{instance_ref}/poweroff",
    PowerAction::Off,
    "Powers an instance off immediately, without involving the guest."
);
power_route!(
    pause,
    "/instances/{instance_ref}/pause",
    PowerAction::Pause,
    "Pauses an instance. Its memory is kept."
);
power_route!(
    unpause,
    "/instances/{instance_ref}/unpause",
    PowerAction::Unpause,
    "Resumes a paused instance."
);
