//! The OpenAPI document: what all operations have in common, and its serialized form.

use axum::body::Bytes;
use axum::http::Method;
use muster_types::settings::Settings;
use utoipa::openapi::path::{Operation, Parameter};
use utoipa::openapi::schema::{Object, ObjectBuilder, Type};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{
    ComponentsBuilder, Content, InfoBuilder, OpenApi, OpenApiBuilder, Ref, RefOr, Response, Server,
};

use crate::response::Success;

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

/// Creates a document without paths.
pub(crate) fn empty() -> OpenApi {
    let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).bearer_format("JWT").build();
    let info = InfoBuilder::new()
        .title("Muster")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some("A private cloud in one program."))
        .build();
    let components = ComponentsBuilder::new()
        .security_scheme("bearerAuth", SecurityScheme::Http(bearer))
        .schema("Error", error_schema())
        .build();
    OpenApiBuilder::new().info(info).components(Some(components)).build()
}

/// Completes the description of an operation with what follows from its route and its handler's return type.
pub(crate) fn complete(
    operation: &mut Operation,
    method: &Method,
    path: &str,
    guarded: bool,
    success: Option<Success>,
) {
    operation.operation_id = Some(operation_id(method, path));
    for parameter in operation.parameters.iter_mut().flatten() {
        if let RefOr::T(parameter) = parameter {
            describe_parameter(parameter);
        }
    }
    if let Some(success) = success {
        describe_success(operation, success);
    }
    if guarded {
        operation.security = Some(vec![SecurityRequirement::new("bearerAuth", [""; 0])]);
        let errors = [
            ("400", "An argument is missing, malformed or not declared."),
            ("401", "The token is missing or invalid, or not valid for this namespace."),
            ("403", "The token lacks the required scope."),
            ("503", "The database is unavailable."),
        ];
        for (status, text) in errors {
            let response = || RefOr::T(Response::new(text));
            operation.responses.responses.entry(status.to_owned()).or_insert_with(response);
        }
    }
    for (status, response) in &mut operation.responses.responses {
        let RefOr::T(response) = response else { continue };
        if status.starts_with(['4', '5']) && response.content.is_empty() {
            let content = Content::new(Some(Ref::from_schema_name("Error")));
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
    if let Some((content_type, schema)) = success.body {
        response.content.insert(content_type.into(), RefOr::T(Content::new(Some(schema))));
    }
}

/// Describes the parameters that many paths share.
fn describe_parameter(parameter: &mut Parameter) {
    let text = match parameter.name.as_str() {
        "address" => "An IPv4 address, such as `10.0.0.5`.",
        "agentoperation_uuid" => "UUID of the agent operation.",
        "artifact_ref" => "UUID or name of the artifact.",
        "blob_uuid" => "UUID of the blob.",
        "claim_ref" => "UUID of the claim.",
        "instance_ref" => "UUID or name of the instance.",
        "interface_uuid" => "UUID of the interface.",
        "key" => "The metadata key.",
        "key_name" => "Name of the key.",
        "namespace" => "Name of the namespace.",
        "network_ref" => "UUID or name of the network.",
        "node" => "UUID or name of the node.",
        "operation_uuid" => "UUID of the operation.",
        "rule" => "Name of the mapping rule.",
        "upload_uuid" => "UUID of the upload.",
        _ => return,
    };
    parameter.description.get_or_insert_with(|| text.into());
}

/// The body of every error.
fn error_schema() -> Object {
    let error = ObjectBuilder::new().schema_type(Type::String).description(Some("The reason."));
    let status = ObjectBuilder::new().schema_type(Type::Integer).description(Some("The HTTP status."));
    let request_id = ObjectBuilder::new().schema_type(Type::String).description(Some(
        "The id of the request, also in the header `x-request-id`, for the log and the events.",
    ));
    ObjectBuilder::new()
        .property("error", error)
        .property("status", status)
        .property("request_id", request_id)
        .required("error")
        .required("status")
        .build()
}
