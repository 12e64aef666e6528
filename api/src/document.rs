//! The OpenAPI document: what all operations have in common, and its serialized form.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, LazyLock};

use axum::http::Method;
use muster_types::scheduling::SchedulingStage;
use muster_types::settings::Settings;
use utoipa::openapi::path::{Operation, Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{KnownFormat, ObjectBuilder, Schema, SchemaFormat, Type};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{
    ComponentsBuilder, Content, Header, InfoBuilder, OpenApi, OpenApiBuilder, Ref, RefOr, Required, Response,
    Server,
};
use utoipa::{PartialSchema, ToSchema};

use crate::access::Access;
use crate::error::ErrorBody;
use crate::lists::ListFields;
use crate::response::Success;
use crate::static_file::StaticFile;
use crate::waiting::{self, WaitableStates};
use muster_control::auth::scopes::CLUSTER_ADMIN;

/// The OpenAPI document, serialized when it is first requested.
#[derive(Debug, Clone)]
pub(crate) struct Document(Arc<LazyLock<StaticFile, Box<dyn FnOnce() -> StaticFile + Send + Sync>>>);

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
        Self(Arc::new(LazyLock::new(Box::new(move || {
            let json = document.to_pretty_json().expect("an OpenAPI document has only string keys");
            StaticFile::new("application/json", json)
        }))))
    }

    pub(crate) fn file(&self) -> &StaticFile {
        &self.0
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(self.file().bytes()).expect("the document is made from a string")
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
    /// The fields of the records of a list.
    pub(crate) list: Option<&'a ListFields>,
    /// The states of a record that a request can wait for.
    pub(crate) states: Option<&'a WaitableStates>,
    /// Whether it returns a record, which has a tag.
    pub(crate) is_record: bool,
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
    if let Some(list) = context.list {
        describe_list(operation, list);
    }
    if context.is_record {
        describe_record(operation, context.states);
    }
    if *context.method == Method::POST && context.access != Access::Public {
        describe_idempotency(operation, context.path);
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

fn text_parameter(name: &str, place: ParameterIn, description: String) -> RefOr<Parameter> {
    let schema = ObjectBuilder::new().schema_type(Type::String).build();
    let parameter = ParameterBuilder::new().name(name).parameter_in(place);
    RefOr::T(parameter.description(Some(description)).schema(Some(schema)).build())
}

fn text_header(description: &str) -> RefOr<Header> {
    let mut header = Header::new(ObjectBuilder::new().schema_type(Type::String).build());
    header.description = Some(description.into());
    RefOr::T(header)
}

/// Adds the tag of a record, and for which states a request can wait.
fn describe_record(operation: &mut Operation, states: Option<&WaitableStates>) {
    let parameters = operation.parameters.get_or_insert_default();
    let text = "The tag of a version that the client knows. If it is the current one, the response is 304 without a body.";
    parameters.push(text_parameter("If-None-Match", ParameterIn::Header, text.into()));
    let responses = &mut operation.responses.responses;
    responses.insert("304".into(), RefOr::T(Response::new("The record has not changed.")));
    if let Some(RefOr::T(response)) = responses.get_mut("200") {
        response.headers.insert("ETag".into(), text_header("Identifies this version of the record."));
    }
    if let Some(states) = states {
        parameters.push(text_parameter(waiting::PARAMETER, ParameterIn::Query, states.description()));
        for (status, text) in [
            ("409", "With `wait`: the object has reached another final state."),
            ("429", "With `wait`: too many requests of the namespace are waiting."),
        ] {
            responses.entry(status.to_owned()).or_insert_with(|| RefOr::T(Response::new(text)));
        }
    }
}

/// Adds the header `If-Match` to the operations that change a record or something below its path.
pub(crate) fn describe_preconditions(document: &mut OpenApi, records: &HashSet<String>) {
    let is_below = |path: &str| {
        let mut ends = path.match_indices('/').map(|(at, _)| at).chain([path.len()]);
        ends.any(|end| records.contains(&path[..end]))
    };
    for (path, item) in &mut document.paths.paths {
        if !is_below(path) {
            continue;
        }
        for operation in [&mut item.post, &mut item.put, &mut item.delete].into_iter().flatten() {
            // Public operations change no records.
            if operation.security.is_none() {
                continue;
            }
            let text = "The tag of the record that the change is meant for, from the `ETag` of this path or of the nearest path \
                        above it that has one. If the record has changed, nothing is done.";
            let parameters = operation.parameters.get_or_insert_default();
            parameters.push(text_parameter("If-Match", ParameterIn::Header, text.into()));
            let mut response = Response::new("The record has changed: its tag is not in `If-Match`.");
            let content = Content::new(Some(Ref::from_schema_name(ErrorBody::name())));
            response.content.insert("application/json".into(), RefOr::T(content));
            operation.responses.responses.insert("412".into(), RefOr::T(response));
        }
    }
}

/// Adds what follows from the header `Idempotency-Key`, unless it is rejected for the operation.
fn describe_idempotency(operation: &mut Operation, path: &str) {
    let parameters = operation.parameters.get_or_insert_default();
    // A connection that changes its protocol cannot be repeated.
    if path == "/upload/{upload_uuid}" || operation.responses.responses.contains_key("101") {
        return;
    }
    let text = "Identifies the request, for 24 hours: up to 255 printable ASCII characters. If it is repeated with the same \
                key, it is not executed again, and the response is that of the first one, with the header \
                `Idempotency-Replayed: true`.";
    parameters.push(text_parameter("Idempotency-Key", ParameterIn::Header, text.into()));
    for (status, text) in [
        ("409", "The request with the same `Idempotency-Key` is running, or its response was lost."),
        ("422", "The `Idempotency-Key` was used for another request."),
        ("429", "The namespace has too many idempotency keys."),
    ] {
        let responses = &mut operation.responses.responses;
        responses.entry(status.to_owned()).or_insert_with(|| RefOr::T(Response::new(text)));
    }
}

/// Adds the parameters that all lists have, and the headers of their responses.
fn describe_list(operation: &mut Operation, list: &ListFields) {
    let parameters = operation.parameters.get_or_insert_default();
    let declared = |name: &str, parameters: &[RefOr<Parameter>]| {
        parameters.iter().any(|known| matches!(known, RefOr::T(known) if known.name == name))
    };
    for parameter in list.parameters() {
        if !declared(&parameter.name, parameters) {
            parameters.push(RefOr::T(parameter));
        }
    }
    let Some(RefOr::T(response)) = operation.responses.responses.get_mut("200") else { return };
    for (name, text) in [
        ("Link", "The next page, with `rel=\"next\"`, relative to the URL of the request."),
        ("X-Next-Cursor", "The cursor of the next page. Absent on the last page."),
    ] {
        response.headers.insert(name.into(), text_header(text));
    }
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
        "webhook" => "Name of the webhook.",
        "delivery" => "UUID of the delivery.",
        "upload_uuid" => "UUID of the upload.",
        _ => return,
    };
    parameter.description.get_or_insert_with(|| text.into());
}
