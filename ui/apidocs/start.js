// Load the API description of this server. No other server is contacted.
SwaggerUIBundle({ url: new URL("../openapi.json", document.baseURI).href, dom_id: "#api", deepLinking: true, validatorUrl: null });
