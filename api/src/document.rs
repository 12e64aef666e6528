//! The OpenAPI document: what all operations have in common, and its serialized form.

use std::collections::BTreeMap;

use axum::body::Bytes;
use axum::http::Method;
use muster_types::scheduling::SchedulingStage;
use muster_types::settings::Settings;
use utoipa::openapi::path::{Operation, Parameter};
use utoipa::openapi::schema::{KnownFormat, ObjectBuilder, Schema, SchemaFormat, Type};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{
    ComponentsBuilder, Content, InfoBuilder, OpenApi, OpenApiBuilder, Ref, RefOr, Required, Response, Server,
};
use utoipa::{PartialSchema, ToSchema};

use crate::error::ErrorBody;
use crate::response::Success;
use crate::table::Access;
use muster_control::auth::scopes::CLUSTER_ADMIN;

/// The serialized OpenAPI document.
#[derive(Debug, Clone)]
pub(crate) struct Document(Bytes);

impl Document {
    pub(crate) fn new(mut document: OpenApi, settings: &Settings) -> Self {
        let defaults =
            settings.api_advertised_host == "localhost" && settings.api_advertised_base_path == "/";
        let servers = settings.api_advertised_http_schemes.split_whitespace().map(|scheme| {
            let path = settings.api_advertised_base_path.trim_end_matches('/');
            Server::new(format!("{scheme}://{}{path}", settings.api_advertised_host))
        });
        // Relative to the location of the document, unless configured.
        document.servers = Some(if defaults { vec![Server::new("/")] } else { servers.collect() });
        let json = document.to_pretty_json().expect("an OpenAPI document has only string keys");
        Self(Bytes::from(json))
    }

    pub(crate) fn bytes(&self) -> Bytes {
        self.0.clone()
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.0).expect("the document is made from a string")
    }
}

const DESCRIPTION: &str = "\
A private cloud in one program.

Get a token with `POST /auth`, and send it with every other request in the header `Authorization: Bearer …`. Every
response has the header `x-request-id`. Browsers use a cookie instead; see `POST /auth/session`.

Errors have the schema `Error`, whatever the status; that includes 404 for an unknown path and 405 for an unknown method.
Arguments that an operation does not declare are rejected with 400. For existing clients, arguments are also accepted in
another form than documented here: query parameters in a JSON body and the other way round, numbers and booleans as strings.";

/// Creates a document without paths.
pub(crate) fn empty() -> OpenApi {
    let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).bearer_format("JWT").build();
    let info = InfoBuilder::new()
        .title("Muster")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some(DESCRIPTION))
        .build();
    let components = ComponentsBuilder::new()
        .security_scheme("bearerAuth", SecurityScheme::Http(bearer))
        .schema(ErrorBody::name(), ErrorBody::schema())
        .schema(SchedulingStage::name(), SchedulingStage::schema())
        .build();
    OpenApiBuilder::new().info(info).components(Some(components)).build()
}

/// What the document says about an operation in addition to its handler's annotation.
pub(crate) struct OperationContext<'a> {
    pub(crate) method: &'a Method,
    pub(crate) path: &'a str,
    pub(crate) access: Access,
    /// The scope that a token needs.
    pub(crate) scope: &'a str,
    pub(crate) success: Option<Success>,
    /// The schemas that the annotation refers to.
    pub(crate) schemas: &'a [(String, RefOr<Schema>)],
}

/// Completes the description of an operation with what follows from its route and its handler's types.
pub(crate) fn complete(operation: &mut Operation, context: OperationContext<'_>) {
    operation.operation_id = Some(operation_id(context.method, context.path));
    for parameter in operation.parameters.iter_mut().flatten() {
        if let RefOr::T(parameter) = parameter {
            describe_parameter(parameter);
        }
    }
    let access = describe_access(context.access, context.scope);
    operation.description = Some(match operation.description.take() {
        Some(text) if !text.is_empty() => format!("{text}\n\n{access}"),
        _ => access,
    });
    if let Some(success) = context.success {
        describe_success(operation, success);
    }
    if let Some(RefOr::T(body)) = &mut operation.request_body {
        body.required =
            Some(if needs_body(&body.content, context.schemas) { Required::True } else { Required::False });
    }
    describe_errors(operation, context.access);
    describe_bytes(operation);
}

/// Returns the sentence about who may call an operation.
fn describe_access(access: Access, scope: &str) -> String {
    match access {
        Access::Public => "Requires no token.".into(),
        Access::Token if scope.is_empty() => "Requires a token, whatever its scopes.".into(),
        Access::Token => format!("Requires a token with the scope `{scope}`."),
        Access::Admin => {
            format!(
                "Requires a token of the namespace `system` with the scopes `{scope}` and `{CLUSTER_ADMIN}`."
            )
        }
    }
}

/// Returns whether an operation cannot be called without a body: a JSON body has required members, or it is not JSON.
fn needs_body(content: &BTreeMap<String, RefOr<Content>>, schemas: &[(String, RefOr<Schema>)]) -> bool {
    content.values().any(|content| {
        let RefOr::T(Content { schema: Some(RefOr::Ref(reference)), .. }) = content else { return true };
        let name = reference.ref_location.rsplit('/').next().unwrap_or_default();
        let schema = schemas.iter().find(|(known, _)| known == name);
        !matches!(schema, Some((_, RefOr::T(Schema::Object(object)))) if object.required.is_empty())
    })
}

/// Describes bodies that are not JSON as bytes; `utoipa` describes `Vec<u8>` as a list of numbers.
fn describe_bytes(operation: &mut Operation) {
    let bodies = operation.request_body.iter_mut().filter_map(|body| match body {
        RefOr::T(body) => Some(body.content.iter_mut()),
        RefOr::Ref(_) => None,
    });
    let responses = operation.responses.responses.values_mut().filter_map(|response| match response {
        RefOr::T(response) => Some(response.content.iter_mut()),
        RefOr::Ref(_) => None,
    });
    for (content_type, content) in bodies.flatten().chain(responses.flatten()) {
        let RefOr::T(Content { schema: Some(schema @ RefOr::T(Schema::Array(_))), .. }) = content else {
            continue;
        };
        if content_type != "application/json" {
            let format = SchemaFormat::KnownFormat(KnownFormat::Binary);
            *schema = ObjectBuilder::new().schema_type(Type::String).format(Some(format)).build().into();
        }
    }
}

/// Adds the errors that many operations have in common, and the body of all errors.
fn describe_errors(operation: &mut Operation, access: Access) {
    let mut common = vec![("500", "An internal error; the log has the reason.")];
    if access != Access::Public {
        operation.security = Some(vec![SecurityRequirement::new("bearerAuth", [""; 0])]);
        common.extend([
            ("400", "An argument is missing, malformed or not declared."),
            ("401", "The token is missing or invalid, or not valid for this namespace."),
            ("403", "The token lacks the required scope, or a page of another server sent the request."),
            ("503", "The database is unavailable, or too many request bodies of the caller are in flight."),
        ]);
    }
    // Calls with a token accept arguments in a body, whatever the method.
    if access != Access::Public || operation.request_body.is_some() {
        common.extend([
            ("408", "The request body did not arrive in time."),
            ("413", "The request body is too large."),
        ]);
    }
    let responses = &mut operation.responses.responses;
    for (status, text) in common {
        responses.entry(status.to_owned()).or_insert_with(|| RefOr::T(Response::new(text)));
    }
    for (status, response) in responses {
        let RefOr::T(response) = response else { continue };
        if status.starts_with(['4', '5']) && response.content.is_empty() {
            let content = Content::new(Some(Ref::from_schema_name(ErrorBody::name())));
            response.content.insert("application/json".into(), RefOr::T(content));
        }
    }
}

/// Returns an identifier such as `get_instances_instance_ref`.
fn operation_id(method: &Method, path: &str) -> String {
    let words = path.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    let method = method.as_str().to_lowercase();
    std::iter::once(method).chain(words.map(str::to_owned)).collect::<Vec<_>>().join("_")
}

/// Adds the body of a successful response, as the handler's return type defines it.
fn describe_success(operation: &mut Operation, success: Success) {
    let responses = &mut operation.responses.responses;
    let status = success.status.as_str().to_owned();
    let response = responses.entry(status).or_insert_with(|| RefOr::T(Response::new("")));
    let RefOr::T(response) = response else { return };
    if response.description.is_empty() {
        response.description = success.description.into();
    }
    response.content.clear();
    response.content.insert("application/json".into(), RefOr::T(Content::new(Some(success.body))));
}

/// Describes the parameters that many paths share.
fn describe_parameter(parameter: &mut Parameter) {
    let text = match parameter.name.as_str() {
        "address" => "An IPv4 address, such as `10.0.0.5`.",
        "algorithm" => "The hash algorithm: `sha1`, `sha256`, `sha512` or `xxh128`.",
        "agentoperation_uuid" => "UUID of the agent operation.",
        "artifact_ref" => "UUID or name of the artifact.",
        "blob_uuid" => "UUID of the blob.",
        "claim_ref" => "UUID of the claim.",
        "external_namespace" => "Name of the trusted namespace.",
        "file" => "Name of the file.",
        "hash" => "The checksum in hexadecimal.",
        "index" => "Number of the version.",
        "instance_ref" => "UUID or name of the instance.",
        "interface_uuid" => "UUID of the interface.",
        "key" => "The metadata key.",
        "key_name" => "Name of the key.",
        "name" => "Name of the issuer.",
        "namespace" => "Name of the namespace.",
        "network_ref" => "UUID or name of the network.",
        "node" => "UUID or name of the node.",
        "operation_type" => "Type of the operation, such as `net_op`.",
        "operation_uuid" => "UUID of the operation.",
        "path" => "The label, or namespace and label separated by a slash.",
        "rule" => "Name of the mapping rule.",
        "upload_uuid" => "UUID of the upload.",
        _ => return,
    };
    parameter.description.get_or_insert_with(|| text.into());
}
