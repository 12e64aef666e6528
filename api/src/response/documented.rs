//! The OpenAPI description of a successful response, derived from the return type of its handler.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use axum::response::Response;
use muster_control::objects::instance::console::ProxyRecord;
use muster_control::objects::instance::snapshot::SnapshotRecord;
use muster_types::address::AddressRecord;
use muster_types::agent_operation::AgentOperationRecord;
use muster_types::artifact::{ArtifactRecord, VersionRecord};
use muster_types::blob::BlobRecord;
use muster_types::claim::ClaimRecord;
use muster_types::cluster_upgrade::ClusterUpgradeRecord;
use muster_types::event::EventRecord;
use muster_types::explanation::Explanation;
use muster_types::ids::ArtifactId;
use muster_types::instance::InstanceRecord;
use muster_types::interface::InterfaceRecord;
use muster_types::issuer::IssuerRecord;
use muster_types::key::KeyRecord;
use muster_types::namespace::NamespaceRecord;
use muster_types::network::{NetworkRecord, PingResult};
use muster_types::node::{DrainRecord, EvacuationRecord, NodeRecord};
use muster_types::operation::{OperationHandle, OperationRecord};
use muster_types::quota::QuotaRecord;
use muster_types::rebalance::RebalanceRecord;
use muster_types::rule::RuleRecord;
use muster_types::upload::UploadRecord;
use muster_types::webhook::{DeliveryRecord, WebhookRecord};
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ArrayBuilder, ObjectBuilder, OneOfBuilder, Schema, SchemaType, Type};

use super::{Accepted, Json, Null, Opaque};
use crate::error::ApiError;

/// Schemas by name, for the components of the document.
pub(crate) type Schemas = Vec<(String, RefOr<Schema>)>;

/// The description of a successful response in the OpenAPI document.
pub(crate) struct Success {
    pub(crate) status: StatusCode,
    /// Used if the handler's annotation has none.
    pub(crate) description: &'static str,
    /// The schema of the JSON body.
    pub(crate) body: RefOr<Schema>,
    /// Schemas that the body refers to.
    pub(crate) schemas: Schemas,
    /// Whether a request may ask for a part of it; see [`lists`](crate::lists).
    pub(crate) is_list: bool,
}

impl Success {
    pub(crate) fn json<T: JsonBody>(status: StatusCode, description: &'static str) -> Self {
        let mut schemas = Schemas::new();
        T::collect_schemas(&mut schemas);
        Self { status, description, body: T::schema(), schemas, is_list: false }
    }
}

/// A type that a handler returns.
pub(crate) trait Documented {
    /// Returns the description, or `None` for raw responses, which the handler's annotation describes.
    fn success() -> Option<Success>;
}

impl<T: JsonBody> Documented for Json<T> {
    fn success() -> Option<Success> {
        Some(Success::json::<T>(StatusCode::OK, "Success."))
    }
}

impl<T: JsonBody> Documented for Accepted<T> {
    fn success() -> Option<Success> {
        Some(Success::json::<T>(StatusCode::ACCEPTED, "Accepted; the work continues in the background."))
    }
}

impl Documented for Null {
    fn success() -> Option<Success> {
        Some(Success::json::<()>(StatusCode::OK, "`null`"))
    }
}

impl Documented for std::convert::Infallible {
    fn success() -> Option<Success> {
        None
    }
}

impl Documented for Response {
    fn success() -> Option<Success> {
        None
    }
}

impl<T: Documented> Documented for Result<T, ApiError> {
    fn success() -> Option<Success> {
        T::success()
    }
}

/// A handler function, of any number of arguments.
pub(crate) trait DocumentedHandler<Arguments> {
    fn success(&self) -> Option<Success>;
}

macro_rules! documented_handlers {
    ($(($($argument:ident),*))*) => {$(
        impl<F, Fut, $($argument,)*> DocumentedHandler<($($argument,)*)> for F
        where
            F: Fn($($argument),*) -> Fut,
            Fut: Future<Output: Documented>,
        {
            fn success(&self) -> Option<Success> {
                <Fut::Output as Documented>::success()
            }
        }
    )*};
}
documented_handlers! { () (A) (A, B) (A, B, C) (A, B, C, D) (A, B, C, D, E) (A, B, C, D, E, G) }

/// A type that is sent as a JSON document.
pub(crate) trait JsonBody: Serialize {
    fn schema() -> RefOr<Schema>;

    /// Adds the schemas that [`schema`](Self::schema) refers to.
    fn collect_schemas(_: &mut Schemas) {}
}

/// Implements [`JsonBody`] for types with a named schema.
macro_rules! named_bodies {
    ($($body:ty),* $(,)?) => {$(
        impl $crate::response::JsonBody for $body {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
                utoipa::openapi::Ref::from_schema_name(<$body as utoipa::ToSchema>::name()).into()
            }

            fn collect_schemas(
                schemas: &mut Vec<(String, utoipa::openapi::RefOr<utoipa::openapi::schema::Schema>)>,
            ) {
                let name = <$body as utoipa::ToSchema>::name().into_owned();
                schemas.push((name, <$body as utoipa::PartialSchema>::schema()));
                <$body as utoipa::ToSchema>::schemas(schemas);
            }
        }
    )*};
}
pub(crate) use named_bodies;

named_bodies! {
    AddressRecord, AgentOperationRecord, ArtifactId, ArtifactRecord, BlobRecord, ClaimRecord, ClusterUpgradeRecord,
    DeliveryRecord, DrainRecord, EvacuationRecord, EventRecord, Explanation, InstanceRecord, InterfaceRecord, IssuerRecord, KeyRecord,
    NamespaceRecord, NetworkRecord, NodeRecord, OperationHandle, OperationRecord, PingResult, ProxyRecord, QuotaRecord,
    RebalanceRecord, RuleRecord, SnapshotRecord, UploadRecord, VersionRecord, WebhookRecord,
}

impl JsonBody for String {
    fn schema() -> RefOr<Schema> {
        <Self as utoipa::PartialSchema>::schema()
    }
}

impl JsonBody for u64 {
    fn schema() -> RefOr<Schema> {
        <Self as utoipa::PartialSchema>::schema()
    }
}

impl JsonBody for () {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new().schema_type(Type::Null).build().into()
    }
}

impl JsonBody for Map<String, Value> {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new().build().into()
    }
}

impl<T: Serialize> JsonBody for Opaque<T> {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new().build().into()
    }
}

impl<T: JsonBody> JsonBody for Vec<T> {
    fn schema() -> RefOr<Schema> {
        ArrayBuilder::new().items(T::schema()).build().into()
    }

    fn collect_schemas(schemas: &mut Schemas) {
        T::collect_schemas(schemas);
    }
}

impl<T: JsonBody> JsonBody for BTreeMap<String, T> {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .property_names(Some(Schema::from(ObjectBuilder::new().schema_type(Type::String))))
            .additional_properties(Some(T::schema()))
            .build()
            .into()
    }

    fn collect_schemas(schemas: &mut Schemas) {
        T::collect_schemas(schemas);
    }
}

impl<T: JsonBody> JsonBody for Option<T> {
    fn schema() -> RefOr<Schema> {
        match T::schema() {
            RefOr::T(Schema::Object(mut object)) => {
                if let SchemaType::Type(schema_type) = object.schema_type {
                    object.schema_type = SchemaType::from_iter([schema_type, Type::Null]);
                }
                object.into()
            }
            schema => {
                let null = ObjectBuilder::new().schema_type(Type::Null);
                Schema::from(OneOfBuilder::new().item(schema).item(null)).into()
            }
        }
    }

    fn collect_schemas(schemas: &mut Schemas) {
        T::collect_schemas(schemas);
    }
}
