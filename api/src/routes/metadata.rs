//! Metadata routes, which all types of objects share.

use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::arguments::nullable;

/// A metadata item.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = NewItem)]
#[schema(example = json!({"key": "colour", "value": "blue"}))]
pub(crate) struct NewMetadataItem {
    /// The key of the item.
    #[schema(value_type = String)]
    pub(crate) key: Option<String>,
    /// Any JSON value.
    #[serde(default, deserialize_with = "nullable")]
    pub(crate) value: Option<Value>,
}

/// The value of a metadata item.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ItemValue)]
#[schema(example = json!({"value": ["web", "test"]}))]
pub(crate) struct MetadataValue {
    /// Any JSON value.
    #[serde(default, deserialize_with = "nullable")]
    pub(crate) value: Option<Value>,
}

/// Defines a module `metadata` with four handlers. The path parameters identify an object: `$find` finds one that the
/// caller may read, `$find_own` one that it may change.
macro_rules! metadata_routes {
    ($path:literal, $item_path:literal, ($($name:literal => $reference:ident: $type:ident),+), $tag:literal, $find:path, $find_own:path) => {
        pub(crate) mod metadata {
            use std::sync::Arc;

            use axum::extract::{Path, State};
            use serde_json::{Map, Value};

            use crate::arguments::{Args, NoArgs};
            use crate::error::ApiResult;
            use crate::guard::Authenticated;
            use crate::response::{Json, Null};
            use crate::routes::metadata::{MetadataValue, NewMetadataItem};
            use muster_control::app::App;
            use muster_control::objects::metadata;

            /// Returns the metadata of an object.
            #[utoipa::path(get, path = $path, tag = $tag, params($(($name = String, Path)),+), responses(
                (status = 200, description = "Values by key."), (status = 404, description = "No such object.")))]
            pub(crate) async fn list(
                State(app): State<Arc<App>>,
                Authenticated(caller): Authenticated,
                Path(($($reference,)+)): Path<($($type,)+)>,
                _: Args<NoArgs>,
            ) -> ApiResult<Json<Map<String, Value>>> {
                let object = $find(&app, &caller, $(&$reference),+).await?;
                Ok(Json(metadata::get(&app, &caller, &object).await?))
            }

            /// Creates or replaces a metadata item.
            #[utoipa::path(post, path = $path, tag = $tag, params($(($name = String, Path)),+),
                request_body = NewMetadataItem, responses(
                (status = 400, description = "The key or the value is missing."),
                (status = 404, description = "No such object.")))]
            pub(crate) async fn create(
                State(app): State<Arc<App>>,
                Authenticated(caller): Authenticated,
                Path(($($reference,)+)): Path<($($type,)+)>,
                Args(item): Args<NewMetadataItem>,
            ) -> ApiResult<Null> {
                let object = $find_own(&app, &caller, $(&$reference),+).await?;
                metadata::set(&app, &caller, &object, item.key.as_deref(), item.value).await?;
                Ok(Null)
            }

            /// Creates or replaces the metadata item of a key.
            #[utoipa::path(put, path = $item_path, tag = $tag,
                params($(($name = String, Path),)+ ("key" = String, Path)), request_body = MetadataValue,
                responses((status = 400, description = "The value is missing."),
                (status = 404, description = "No such object.")))]
            pub(crate) async fn update(
                State(app): State<Arc<App>>,
                Authenticated(caller): Authenticated,
                Path(($($reference,)+ key)): Path<($($type,)+ String)>,
                Args(item): Args<MetadataValue>,
            ) -> ApiResult<Null> {
                let object = $find_own(&app, &caller, $(&$reference),+).await?;
                metadata::set(&app, &caller, &object, Some(&key), item.value).await?;
                Ok(Null)
            }

            /// Deletes a metadata item. Does nothing if the key does not exist.
            #[utoipa::path(delete, path = $item_path, tag = $tag,
                params($(($name = String, Path),)+ ("key" = String, Path)),
                responses((status = 404, description = "No such object.")))]
            pub(crate) async fn delete(
                State(app): State<Arc<App>>,
                Authenticated(caller): Authenticated,
                Path(($($reference,)+ key)): Path<($($type,)+ String)>,
                _: Args<NoArgs>,
            ) -> ApiResult<Null> {
                let object = $find_own(&app, &caller, $(&$reference),+).await?;
                metadata::remove(&app, &caller, &object, &key).await?;
                Ok(Null)
            }
        }
    };
}
pub(crate) use metadata_routes;
