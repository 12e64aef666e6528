//! The metadata calls, which every kind of object has alike.

use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::fields::Text;

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct NewItem {
    #[schema(value_type = String)]
    pub(crate) key: Option<Text>,
    /// Any JSON that is not empty.
    pub(crate) value: Option<Value>,
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ItemValue {
    /// Any JSON that is not empty.
    pub(crate) value: Option<Value>,
}

/// Makes a module `metadata` with the four handlers. `$find` finds an
/// object that the caller may read, `$find_own` one that it may change.
macro_rules! metadata_routes {
    ($path:literal, $item_path:literal, $reference:literal, $tag:literal, $find:path, $find_own:path) => {
        pub(crate) mod metadata {
            use std::sync::Arc;

            use axum::extract::{Path, State};

            use muster_control::app::App;
                        use crate::arguments::{Args, Nothing};
            use crate::guard::Authenticated;
            use crate::error::ApiResult;
            use crate::metadata::{ItemValue, NewItem};
            use crate::response::{nothing, ok};
            use muster_control::objects::metadata;

            /// The metadata of an object.
            #[utoipa::path(get, path = $path, tag = $tag, params(($reference = String, Path)), responses(
                (status = 200, description = "key/value pairs", body = Object),
                (status = 404, description = "no such object")))]
            pub(crate) async fn list(
                State(app): State<Arc<App>>,
                Authenticated(caller): Authenticated,
                Path(reference): Path<String>,
                _: Args<Nothing>,
            ) -> ApiResult {
                let object = $find(&app, &caller, &reference).await?;
                Ok(ok(&metadata::get(&app, &object).await?))
            }

            /// Create or replace a metadata key.
            #[utoipa::path(post, path = $path, tag = $tag, params(($reference = String, Path)), request_body = NewItem,
                responses((status = 200, description = "`null`"), (status = 400, description = "no key or no value"),
                (status = 404, description = "no such object")))]
            pub(crate) async fn create(
                State(app): State<Arc<App>>,
                Authenticated(caller): Authenticated,
                Path(reference): Path<String>,
                Args(item): Args<NewItem>,
            ) -> ApiResult {
                let object = $find_own(&app, &caller, &reference).await?;
                let key = item.key.map(|key| key.0);
                metadata::set(&app, &caller, &object, key.as_deref(), item.value).await?;
                Ok(nothing())
            }

            /// Create or replace a metadata key.
            #[utoipa::path(put, path = $item_path, tag = $tag,
                params(($reference = String, Path), ("key" = String, Path)), request_body = ItemValue,
                responses((status = 200, description = "`null`"), (status = 400, description = "no value"),
                (status = 404, description = "no such object")))]
            pub(crate) async fn update(
                State(app): State<Arc<App>>,
                Authenticated(caller): Authenticated,
                Path((reference, key)): Path<(String, String)>,
                Args(item): Args<ItemValue>,
            ) -> ApiResult {
                let object = $find_own(&app, &caller, &reference).await?;
                metadata::set(&app, &caller, &object, Some(&key), item.value).await?;
                Ok(nothing())
            }

            /// Delete a metadata key, if it is there.
            #[utoipa::path(delete, path = $item_path, tag = $tag,
                params(($reference = String, Path), ("key" = String, Path)),
                responses((status = 200, description = "`null`"), (status = 404, description = "no such object")))]
            pub(crate) async fn delete(
                State(app): State<Arc<App>>,
                Authenticated(caller): Authenticated,
                Path((reference, key)): Path<(String, String)>,
                _: Args<Nothing>,
            ) -> ApiResult {
                let object = $find_own(&app, &caller, &reference).await?;
                metadata::remove(&app, &caller, &object, &key).await?;
                Ok(nothing())
            }
        }
    };
}
pub(crate) use metadata_routes;
